"""Whole files of a shard of tables: the parts that a task reads one after the other, put together."""

import itertools
from dataclasses import replace

import numpy as np

from edgefl.tasks.datasets.table_files import iterate_shard


def read_table(*shard, **options):
    """Returns the rows of each file as one part; arguments are those of `iterate_shard`."""
    files = []
    for _, parts in itertools.groupby(iterate_shard(*shard, **options), key=lambda part: part.path):
        first, *others = parts
        texts = zip(*(part.texts for part in (first, *others)), strict=True)
        files.append(
            replace(
                first,
                numbers=np.concatenate([first.numbers, *(part.numbers for part in others)]),
                texts=tuple(tuple(itertools.chain(*column)) for column in texts),
                num_read=sum(part.num_read for part in (first, *others)),
            )
        )
    return files

"""One coordinator's front door for each module, which every test finds as good as new."""

import threading

import pytest
from peer_boards import eventually


@pytest.fixture
def front_door(module_front_door):
    eventually(lambda: not any(thread.name.startswith("reach ") for thread in threading.enumerate()))
    module_front_door.forget()
    return module_front_door

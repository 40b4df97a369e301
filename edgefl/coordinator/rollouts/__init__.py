"""Models, releases and task packs on their way to devices: canaries first, and what became of them."""

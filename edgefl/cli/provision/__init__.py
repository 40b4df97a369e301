"""Commands that make devices of cards, images and running hosts; begin with `commands`."""

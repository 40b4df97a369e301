"""From a blank card to a joined board: renders what lies in `provisioning/`."""

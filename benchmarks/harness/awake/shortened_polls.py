"""Where stock Flower sleeps between two polls, and for how long; see `sitecustomize`."""

SHORT_S = 0.01
POLLS = {
    "flwr.supernode.start_client_internal": 3,  # the SuperNode asks for work
    "flwr.superlink.grid.http_grid": 3,  # the ServerApp asks for answers
}

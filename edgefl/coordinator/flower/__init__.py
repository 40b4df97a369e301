"""The Flower side: SuperLink, Fleet API, message transport and object store."""

"""The one HTTPS port: its routes, who may call them, the page and its live feed."""

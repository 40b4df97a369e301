"""Reading and writing the store's tables, one module for each group of tables; `Store` inherits most of them."""

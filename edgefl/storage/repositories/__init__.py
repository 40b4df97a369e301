"""Reading and writing the store's tables, one module for each group of tables."""

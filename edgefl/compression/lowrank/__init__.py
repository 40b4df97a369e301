"""Low-rank stages: matrices as a few vectors (ATOMO's SVD form, PowerSGD)."""

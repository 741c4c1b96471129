"""The attention kernels; `pe_study.attention` chooses among them."""

"""Networks: plain torch modules, independent of ranks."""

"""Networks: plain torch modules that know nothing of ranks."""

"""Who may speak to whom between pdserve's own processes: addresses that are allowed, and CURVE keys."""

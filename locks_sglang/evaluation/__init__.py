"""Quality measured on keys, queries and values of real served runs: `locks-sglang eval`."""

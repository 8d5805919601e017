"""Quality measured on keys, queries and values of real served runs: `locks-sglang eval`."""

ATTENTION_MAP = "attention_map"
"""What a results file of `eval map` calls its kind."""
ATTENTION_MASS = "attention_mass"
"""The same of `eval mass`."""
OUTPUT_ERROR = "output_error"
"""The same of `eval output`."""

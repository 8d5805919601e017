"""Quality measured on keys, queries and values of real served runs: `locks-sglang eval`."""

ATTENTION_MAP = "attention_map"
"""What a results file of `eval map` calls its kind."""
ATTENTION_MASS = "attention_mass"
"""The same of `eval mass`."""
OUTPUT_ERROR = "output_error"
"""The same of `eval output`."""
WIDTHS = "locks, other widths"
"""Family of the page basis in records other than the served one."""

SELECTORS = ("locks", "dense", "oracle", "page-mean", "min-max", "random", "window", "heavy-hitter")
"""Ways to choose what decode reads, between which a server that is evaluated is switched: see `served`."""
WITHOUT_TAIL = ("dense", "window", "heavy-hitter")
"""Those that have no tail to correct: they read everything, or forget what they do not read."""

"""`python -m locks_sglang` is `locks-sglang`."""

import sys

from .cli import main

sys.exit(main())

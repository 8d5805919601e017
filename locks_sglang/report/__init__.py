"""One HTML page from results files, for a person who decides whether to switch `locks` on: `locks-sglang report`."""

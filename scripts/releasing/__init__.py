"""Parts of `scripts/release`: the distributions, what a release changes, and what is installed to check one."""

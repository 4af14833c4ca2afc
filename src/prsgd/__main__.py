"""``python -m prsgd``, as under torchrun: ``torchrun --nproc-per-node 4 -m prsgd train ...``."""

from prsgd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

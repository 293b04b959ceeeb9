"""`python -m palimpsest`."""

from .cli import main

raise SystemExit(main())

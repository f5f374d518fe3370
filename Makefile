# Everything a fresh machine needs: Python >= 3.11 and make.
#   make test    set up, lint, check types, run the tests
#   make demo    set up, run the main job on built-in images
#   make soak    kill trainings at random moments, some minutes: make soak KILLS=20 for fewer

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A process a core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: test lint types tests slow soak demo bench clean

test: lint types tests

$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'msvit needs Python 3.11 or newer, this is ' + sys.version)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(PYTEST)

demo: $(READY)
	$(BIN)/msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128 --gates disc --shares 0.4 --from-dense --out runs/demo
	$(BIN)/msvit report runs/demo --out runs/demo/report.html

slow: $(VENV)/.ready-slow
	$(PYTEST) -m slow

# Ray for the tests of many machines and playwright for those of the page; without them they are skipped.
$(VENV)/.ready-slow: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,ray,browser]'
	touch $@

KILLS ?= 100
soak: $(READY)
	PYTHONPATH=. $(BIN)/python tests/soak.py --kills $(KILLS)

bench: $(READY)
	$(BIN)/msvit bench --device cpu --batch 1,8 --rounds 20 --seconds 30

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info

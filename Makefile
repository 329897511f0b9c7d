# make figures | make test | make lab | make bench | make zoo: each sets up .venv by itself, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: figures test lab bench zoo .venv

figures: $(STAMP)
	$(BIN)/python -m sandbox figures

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests
	SANDBOX_PRESET=smoke $(BIN)/python -m pytest --nbmake --nbmake-kernel=python3 --nbmake-timeout=300 notebooks

lab: $(STAMP)
	cd notebooks && ../$(BIN)/jupyter lab --ip=127.0.0.1

bench: $(STAMP)
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only

zoo: $(STAMP)
	$(BIN)/python tests/zoo.py

.venv: $(STAMP)

# The stamp is written last, so that an installation that was cut off starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is %d.%d; use make PYTHON=..." % sys.version_info[:2])'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,test]'
	@touch $@

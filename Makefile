# AgentLab. 'make' or 'make help' lists the targets.

SHELL := /bin/bash
GO ?= go

# Output of --version; "unknown" in a source archive without git history.
VERSION ?= $(shell git describe --tags --match 'v*' --dirty 2>/dev/null | sed 's/^v//')
VERSION := $(or $(VERSION),0.1.0-dev)
COMMIT := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)$(shell git diff --quiet HEAD -- 2>/dev/null || echo -dirty)
DATE := $(or $(shell TZ=UTC0 git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null),unknown)

MODULE := github.com/agentlab-vm/agentlab
V := $(MODULE)/internal/version
LDFLAGS := -s -w -X $(V).Version=$(VERSION) -X $(V).Commit=$(COMMIT) -X $(V).Date=$(DATE)
# Static: the same file runs on any Linux, and agent-runner in any guest.
BUILD = CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
PROGRAMS := agentlab agentlabd agent-runner

GOLANGCI_LINT_VERSION := v2.15.0
TOOLS := $(CURDIR)/.cache/tools
# 'make lint' includes vet. Without symbols for debuggers the programs of the tests are
# linked faster.
GOTEST = $(GO) test -vet=off -ldflags='-s -w' -timeout 0
# Wall-clock time of the tests in virtual machines in 'make test'.
TEST_BUDGET ?= 12m
RUN = $(GO) run ./test/run
# Selects the tests in virtual machines and the cases of long tables. It is that of the commit:
# a second run of a commit runs the same ones, the next commit runs others.
AGENTLAB_TEST_SEED ?= $(or $(shell h=$$(git rev-parse --short=12 HEAD 2>/dev/null) && echo $$((0x$$h))),1)
export AGENTLAB_TEST_SEED
# Seconds for all fuzz targets together, or for each of them.
FUZZTOTAL ?= 600
FUZZTIME ?=

.PHONY: help ready build build-all check test test-full race lint bench fuzz mutation docs record demo image deps clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

ready: ## install what running requires, and build the programs at the same time
	@$(MAKE) --no-print-directory build & build=$$!; \
	scripts/deps.sh run; deps=$$?; \
	wait $$build && exit $$deps

build: ## static binaries for this machine into bin/
	@mkdir -p bin
	@$(BUILD) -o bin/ $(addprefix ./cmd/,$(PROGRAMS))
	@ln -sfn agentlab bin/git-remote-agentlab
	@echo "bin/: $(PROGRAMS) $(VERSION)"

build-all: ## static binaries for amd64 and arm64, and agentlab for macOS, into dist/
	@for arch in amd64 arm64; do mkdir -p dist/$$arch; \
	  for p in $(PROGRAMS); do GOOS=linux GOARCH=$$arch $(BUILD) -o dist/$$arch/$$p ./cmd/$$p || exit 1; done; \
	  ln -sfn agentlab dist/$$arch/git-remote-agentlab; \
	  echo "dist/$$arch: $(PROGRAMS) $(VERSION)"; done
	@for arch in amd64 arm64; do mkdir -p dist/darwin-$$arch; \
	  GOOS=darwin GOARCH=$$arch $(BUILD) -o dist/darwin-$$arch/agentlab ./cmd/agentlab || exit 1; \
	  ln -sfn agentlab dist/darwin-$$arch/git-remote-agentlab; \
	  echo "dist/darwin-$$arch: agentlab $(VERSION)"; done

check: build ## quick check of a change: build, unit and script tests, lint; no VM
	@scripts/deps.sh test
	$(RUN) -mode check
	@$(MAKE) --no-print-directory lint

test: deps ## unit, script and kernel tests, the core paths in real VMs, and a sample of the other tests for TEST_BUDGET
	$(RUN) -budget $(TEST_BUDGET)

test-full: deps ## all tests, every case of long tables too (hours)
	$(RUN) -mode full

race: ## the tests that need no VM, under the race detector
	@scripts/deps.sh test race
	$(RUN) -mode race

lint: $(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION) ## formatting, import arrows, size budget, word list, bugs, also for macOS, shell scripts
	@scripts/deps.sh lint
	$(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION) run ./...
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./...
	$(GO) test ./internal/archtest
	shellcheck scripts/*.sh scripts/net/*.sh images/build/*.sh .ci/run

# An installed golangci-lint of this version is used.
$(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION):
	@mkdir -p $(TOOLS)
	@found=$$(command -v golangci-lint || true); \
	if [ -n "$$found" ] && "$$found" version 2>/dev/null | grep -q 'version $(GOLANGCI_LINT_VERSION:v%=%) '; then \
	  ln -sf "$$found" $@; \
	else \
	  echo "installing golangci-lint $(GOLANGCI_LINT_VERSION) into .cache/tools (once, about a minute)"; \
	  GOBIN=$(TOOLS) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION) && mv $(TOOLS)/golangci-lint $@; \
	fi

bench: deps build ## benchmarks, as ratios within one run; raw samples are printed
	@start=$$(date +%s); \
	$(GO) test -run '^$$' -bench . -benchtime 1x -timeout 0 ./test/e2e ./internal/egress/nft ./internal/devproxy; rc=$$?; \
	echo "make bench: $$(( $$(date +%s) - start )) s"; exit $$rc

fuzz: ## every fuzz target, FUZZTOTAL seconds (600) divided among them
	@FUZZTOTAL=$(FUZZTOTAL) FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

mutation: ## check that a test fails for each disabled rule of the network policy
	@scripts/mutation.sh

docs: ## regenerate the generated documents
	$(GOTEST) ./internal/server ./internal/cli ./internal/backends ./internal/egress/probe ./internal/image ./internal/metrics \
	  -run '^Test(Generated|AccessMatrix|CommandReference|Reference|Document)$$' -update

record: deps ## record the terminal session of the README again, with a real agent in a real VM
	AGENTLAB_TEST_RECORD=$(CURDIR)/docs/workflow.cast $(GOTEST) ./test/e2e -run '^TestWorkflow$$'
	$(GOTEST) ./test/cast -run '^TestWorkflowRecording$$' -update

demo: ## a job in a real VM, from an empty machine to a fetched commit
	@scripts/deps.sh run
	@$(MAKE) --no-print-directory build
	@scripts/demo.sh

image: build ## build the base image for the current user
	@scripts/deps.sh run
	bin/agentlab image build base

deps: # install the requirements of running and testing
	@scripts/deps.sh run agents test race browser

clean: ## remove build outputs; images in the user's cache stay
	rm -rf bin dist
	@echo "kept: .cache (tools, the demo's image); 'rm -rf .cache' removes it"

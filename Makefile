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
# VMs of parallel tests share the machine, so a package can be slow.
TEST_TIMEOUT ?= 70m
# How many packages are tested at once: most tests wait more than they compute,
# those with VMs compute. The packages that take longest come first.
WAITERS ?= 6
PACKAGES ?= 3
LONGEST := ./test/e2e ./internal/backend/qemu ./internal/backend/proxmox ./internal/image ./test/cloudimage
# PLAIN packages test less with -short or under the race detector: they have real
# VMs, builds of images, large tables. 'make test' also runs all their tests without
# the detector; UNITS, all other packages, run under the detector only.
PLAIN = $(sort $(patsubst %/,./%,$(dir $(shell grep -rlE --include='*_test.go' 'testing\.Short\(\)|^//go:build !?race' *))))
# Under the race detector, COSTLY packages take more than half of the CPU seconds of all
# packages (190, 135, 110, 106 and 86 of about 1,060). A run that is not full has one of
# them there, RACED, which the last digit of the seed selects, and tests the others,
# UNRACED, with PLAIN.
COSTLY := ./internal/cli ./internal/job ./internal/backend/proxmox ./internal/sandbox ./internal/guest/runner
RACED = $(if $(filter 1,$(AGENTLAB_TEST_FULL)),$(COSTLY),$(shell all=($(COSTLY)) seed=$(AGENTLAB_TEST_SEED) n=$${seed: -1}; \
	echo $${all[n % 5]}))
UNRACED = $(filter-out $(RACED),$(COSTLY))
UNITS = $(shell $(GO) list ./... | grep -vxF -e $(MODULE)/internal/archtest $(patsubst ./%,-e $(MODULE)/%,$(PLAIN) $(COSTLY)))
# 'make lint' includes vet and the package archtest. Without symbols for debuggers
# the programs of the tests are linked faster.
GOTEST = $(GO) test -vet=off -ldflags='-s -w' -timeout $(TEST_TIMEOUT)
# Their tests wait longest.
WAITING := ./internal/egress/nft ./internal/backend/proxmox ./internal/job ./internal/sandbox ./internal/cli
# Every process under the race detector waits for a second at its end, in case
# its remaining goroutines still race; tests start hundreds of processes. SQLite,
# translated from C, has memory of its own: the detector would not find races in it,
# and its checks, with those of unsafe pointers, would take most of the time.
C_CODE := modernc.org/sqlite/lib modernc.org/libc/... modernc.org/memory
RACE = GORACE="$${GORACE:-atexit_sleep_ms=20}" scripts/in-memory.sh $(GOTEST) -race $(C_CODE:%=-gcflags='%=-race=false -d=checkptr=0') -p $(WAITERS) -short \
	$(filter-out $(UNRACED),$(WAITING) $(RACED) $(UNITS) $(PLAIN))
# Selects the cases of long tables that a run tests (test/sample).
ifndef AGENTLAB_TEST_SEED
AGENTLAB_TEST_SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
# Seconds for all fuzz targets together, or for each of them.
FUZZTOTAL ?= 600
FUZZTIME ?=

.PHONY: help build build-all check test test-full race lint bench fuzz mutation docs record demo image deps clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

build: ## static binaries for this machine into bin/
	@mkdir -p bin
	@for p in $(PROGRAMS); do $(BUILD) -o bin/$$p ./cmd/$$p || exit 1; done
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

check: build lint ## quick check of a change: build, lint, unit and script tests; no VM
	@scripts/deps.sh run agents test
	@start=$$(date +%s); \
	scripts/in-memory.sh $(GOTEST) -short -p $(WAITERS) $(WAITING) $$($(GO) list ./... | grep -v '/internal/archtest$$'); rc=$$?; \
	echo "make check: tests took $$(( $$(date +%s) - start )) s"; exit $$rc

test: export AGENTLAB_TEST_SEED := $(AGENTLAB_TEST_SEED)
test: deps ## all tests, with real VMs; some are sampled; most of those without VMs run under the race detector
	@echo "make test: AGENTLAB_TEST_SEED=$$AGENTLAB_TEST_SEED"
	@echo "make test: of the costly packages, under the race detector: $(RACED); without it: $(or $(UNRACED),none)"
	@start=$$(date +%s); rc=0; \
	$(GOTEST) -p $(PACKAGES) $(LONGEST) $(UNRACED) $(PLAIN) || rc=1; \
	$(RACE) || rc=1; \
	echo "make test: $$(( $$(date +%s) - start )) s"; exit $$rc

test-full: ## all tests, every case of long tables too (an hour and more)
	AGENTLAB_TEST_FULL=1 $(MAKE) test TEST_TIMEOUT=3h

race: RACED = $(COSTLY)
race: ## the tests that need no VM, under the race detector
	@scripts/deps.sh run agents test race
	@start=$$(date +%s); $(RACE); rc=$$?; echo "make race: $$(( $$(date +%s) - start )) s"; exit $$rc

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
	$(GO) test -run '^$$' -bench . -benchtime 1x -timeout $(TEST_TIMEOUT) ./test/e2e ./internal/egress/nft ./internal/devproxy; rc=$$?; \
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
	@scripts/deps.sh run agents test race

clean: ## remove build outputs; images in the user's cache stay
	rm -rf bin dist
	@echo "kept: .cache (tools, the demo's image); 'rm -rf .cache' removes it"

# `make help` lists the targets. CI calls the same ones.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION := 2.0.0
BIN     := $(CURDIR)/bin

# go-nvml's header marks many calls as deprecated, which makes the C compiler warn in every build.
export CGO_CFLAGS := -Wno-deprecated-declarations
export CGO_ENABLED := 1

# Without text/template the linker can drop methods without a caller: the tags are grpc's and urfave/cli's own.
# gRPC has its own HTTP/2; metrics and the local socket do not need the one of net/http.
build_flags := -trimpath -tags grpcnotrace,urfave_cli_no_template,nethttpomithttp2 -ldflags "-s -w -X main.version=$(VERSION)"

# A command that must be installed, or what to install.
need = @command -v $(1) >/dev/null || { echo "make $@ needs $(1): $(2)"; exit 2; }

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: tools-present
tools-present:
	$(call need,go,Go 1.26 or newer from https://go.dev/dl)
	$(call need,cc,a C compiler such as apt-get install gcc libc6-dev)

.PHONY: build
build: tools-present ## build bin/nomad-gpu and bin/k8s-gpu
	go build $(build_flags) -o $(BIN)/ ./cmd/...

.PHONY: demo
demo: build ## run both agents side by side on this machine's GPUs, or on a simulated machine
	go run ./test/demo -bin $(BIN)

# The tests wait more than they compute, so more packages run at the same time than there are CPUs. Their many small files
# are in memory if /dev/shm has 4 GB free and allows libraries and device nodes.
test_dir = $(shell test/tmpdir)

.PHONY: test
test: tools-present ## run the tests (the simulated driver stands in for a GPU)
	TMPDIR="$(test_dir)" go test -p $$((2 * $$(nproc))) ./...

# Packages whose tests only run the built binaries have nothing that the race detector could see.
without_races = /test/(agents|binaries|golden|live|walls)$$

.PHONY: race
race: tools-present ## run the tests under the race detector
	TMPDIR="$(test_dir)" go test -race -p $$((2 * $$(nproc))) $$(go list ./... | grep -vE '$(without_races)')

.PHONY: lint
lint: tools-present ## check style, import rules and tidiness
	cd tools && go build -o $(BIN)/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	$(BIN)/golangci-lint run ./...
	for dir in . tools test/conformance/nomad test/conformance/kubelet test/conformance/allocator test/conformance/cdi test/conformance/cdi/reader test/conformance/cdi/toolkit test/conformance/labels test/pictures; do (cd $$dir && go mod tidy -diff) || exit 1; done

.PHONY: goldens
goldens: tools-present ## write every golden file again: git diff shows what changed
	go test ./internal/core -run Health -update
	go test ./internal/doctor -update
	go test ./internal/kubeadapter -run Strategies -update
	go test ./internal/config/policy ./internal/core/health ./internal/core/health/xid ./internal/core/nvidia ./internal/nomadadapter ./internal/checkpoint ./internal/report ./test/parity ./test/golden ./test/metrics ./test/placement ./test/walls -update

.PHONY: fmt
fmt: ## format the code
	gofmt -w cmd internal test

.PHONY: conformance
conformance: build ## run the binaries under Nomad's and kubelet's own device managers (kubelet's part needs root), compare with NVIDIA's placement, read CDI files as runtimes do
	cd test/conformance/nomad && go test -trimpath -count=1 ./...
	cd test/conformance/kubelet && go test -trimpath -count=1 ./...
	cd test/conformance/allocator && go test -trimpath -count=1 ./...
	cd test/conformance/cdi && go test -trimpath -count=1 ./...
	cd test/conformance/labels && go test -trimpath -count=1 ./...

.PHONY: pictures
pictures: build ## look at the status page in Chromium, run the tests of the Prometheus rules, check the dashboard (root for apt)
	test/pictures/packages
	cd test/pictures && go test -trimpath -count=1 ./...

.PHONY: e2e
e2e: build pictures ## make pictures, then run a real Nomad and a real Kubernetes on this machine (root; builds them once, about 15 min)
	test/e2e/run

.PHONY: fuzz
fuzz: tools-present ## fuzz everything that parses, for FUZZTIME in all (default 10m)
	test/fuzz $(or $(FUZZTIME),10m)

.PHONY: storm
storm: tools-present ## the long runs: 1,000 restarts of either kubelet, 10,000 faults in half an hour (1 to 1.5 hours)
	TANDEM_STORM=1000 TANDEM_STORM_P99=1s go test ./internal/kubeadapter -count=1 -run '^TestStorm$$' -v -timeout 60m
	TANDEM_STORM_FAULTS=10000 TANDEM_STORM_FOR=30m go test -race ./test/storm -count=1 -v -timeout 3h

.PHONY: bench
bench: tools-present ## run the benchmarks (2 min)
	go test -run '^$$' -bench . -benchmem -benchtime 300ms ./internal/... ./test/...

.PHONY: numbers
numbers: build ## measure the built binaries as processes, an idle minute by part (perf), and other device plugins: PEER=path,path (20 min)
	go run ./test/numbers -bin $(BIN) -peer "$(PEER)"

.PHONY: clean
clean: ## remove what was built
	rm -rf $(BIN)

# `make help` lists the targets. CI calls the same ones.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION := 2.0.0
# The later version to which docs/install.md and make e2e upgrade.
NEXT    := 2.1.0
# The simulated machine of make numbers; empty: the GPUs of this node.
MACHINE := h100x8
BIN     := $(CURDIR)/bin
DIST    := $(CURDIR)/dist

# What is built for other machines: architectures of Go's names, and the base of the image (see tools/release/image).
ARCHES ?= $(shell go env GOHOSTARCH)
BASE   ?= pinned

# go-nvml's header marks many calls as deprecated, which makes the C compiler warn in every build.
export CGO_CFLAGS := -Wno-deprecated-declarations
export CGO_ENABLED := 1
# The oldest instruction sets, also where "go env -w" has newer ones.
export GOAMD64 := v1
export GOARM64 := v8.0

# Without text/template the linker can drop methods without a caller: the tags are grpc's and urfave/cli's own.
# gRPC has its own HTTP/2; metrics and the local socket do not need the one of net/http.
# The provenance of a release names the commit; a binary does not, so that it changes with its code alone, whatever GOFLAGS has.
tags        := grpcnotrace,urfave_cli_no_template,nethttpomithttp2
build_flags := -trimpath -buildvcs=false -tags $(tags) -ldflags "-s -w -X main.version=$(VERSION)"
# What tests and the programs of this repository link is compiled as it is for the binaries, and so once.
same_flags  := -trimpath -tags $(tags)

# A command that must be installed, or what to install.
need = @command -v $(1) >/dev/null || { echo "make $@ needs $(1): $(2)"; exit 2; }

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

.PHONY: tools-present
tools-present:
	$(call need,go,Go 1.26 or newer from https://go.dev/dl)
	$(call need,cc,a C compiler such as apt-get install gcc libc6-dev)

.PHONY: build
build: tools-present ## build bin/nomad-gpu, bin/k8s-gpu and bin/gpu-fleet, which is static
	go build $(build_flags) -o $(BIN)/ ./cmd/nomad-gpu ./cmd/k8s-gpu
	CGO_ENABLED=0 go build $(build_flags) -o $(BIN)/ ./cmd/gpu-fleet

.PHONY: binaries
binaries: tools-present ## build all binaries into dist/linux-ARCH: ARCHES="amd64 arm64" (default: this machine's)
	for arch in $(ARCHES); do \
	  cc=$$(tools/release/cc $$arch); \
	  GOOS=linux GOARCH=$$arch CC=$$cc go build $(build_flags) -o $(DIST)/linux-$$arch/ ./cmd/nomad-gpu ./cmd/k8s-gpu; \
	  CGO_ENABLED=0 GOOS=linux GOARCH=$$arch go build $(build_flags) -o $(DIST)/linux-$$arch/ ./cmd/gpu-fleet; \
	done

.PHONY: licenses
licenses: binaries ## write the licenses of all that the binaries link into dist/licenses
	cd tools/release && go build -trimpath -o $(BIN)/release .
	for arch in $(ARCHES); do for binary in nomad-gpu k8s-gpu gpu-fleet; do \
	  $(BIN)/release licenses $(DIST)/linux-$$arch/$$binary $(DIST)/licenses/linux-$$arch/$$binary; \
	done; done

.PHONY: image
image: licenses ## build the images of k8s-gpu and gpu-fleet into dist/, for ARCHES: BASE=debian needs no registry
	for binary in k8s-gpu gpu-fleet; do tools/release/image $(VERSION) $(BASE) $(DIST)/$$binary-$(VERSION).oci.tar $(ARCHES); done

.PHONY: next-image
next-image: ## build the image of the version NEXT into dist/next, for make e2e
	$(MAKE) image VERSION=$(NEXT) DIST=$(DIST)/next

.PHONY: packages
packages: licenses ## build a deb and an rpm of each binary into dist/, for ARCHES
	tools/release/packages $(VERSION) $(DIST) $(ARCHES)

# A release has both architectures unless ARCHES is given.
release_arches = $(if $(filter file,$(origin ARCHES)),amd64 arm64,$(ARCHES))

.PHONY: release
release: tools-present ## build what is published into dist/: BASE=debian, KEY=cosign.key signs it, DIRTY=1 (docs/releasing.md)
	tools/release/clean "$(DIRTY)"
	mkdir -p $(DIST) && find $(DIST) -maxdepth 1 -type f -delete
	$(MAKE) --no-print-directory image ARCHES="$(release_arches)"
	tools/release/release $(VERSION) $(BASE) $(release_arches)
	$(if $(KEY),tools/release/sign $(DIST) $(KEY),@echo "make release: not signed: KEY names no key of cosign")

.PHONY: release-check
release-check: tools-present ## build the release twice, compare, and test what was built (root, apt; minutes)
	test/release/run

.PHONY: vuln
vuln: tools-present ## look for known vulnerabilities that the binaries reach: GOVULNDB=mirror of https://vuln.go.dev
	tools/release/vuln

.PHONY: demo
demo: build ## run both agents side by side on this machine's GPUs, or on a simulated machine
	go run $(same_flags) ./test/demo -bin $(BIN)

.PHONY: demo-fleet
demo-fleet: build ## show gpu-fleet move work off faulty GPUs of a real Nomad and a real Kubernetes (root; builds them once, about 15 min)
	$(MAKE) --no-print-directory image BASE=debian
	test/e2e/run -demo

# The tests wait more than they compute, so more packages run at the same time than there are CPUs. Their many small files
# are in memory if /dev/shm has 4 GB free and allows libraries and device nodes.
test_dir = $(shell test/tmpdir)

# Each package is compiled and tested once: under the race detector, if there is something that it could see. There is nothing in packages
# that start no goroutine, nor in tests that only run the built binaries or read documents.
without_races = /(internal/(core(|/gpu|/health|/health/xid|/holders|/inventory|/use)|config/.*|cdi/(driverfiles|spec|specfile)|cli/importer(|/.*)|kubeadapter(|/dra/(deviceclass|deviceconfig|resourceslice))|nomadadapter/clientconfig|operator/(explain|metrics)|rescue|util/(problem|setting|terminal))|test/(agents|binaries|docs(|/.*)|golden|live|metrics|walls))$$

.PHONY: test
test: tools-present ## run the tests, most under the race detector (the simulated driver stands in for a GPU)
	$(MAKE) --no-print-directory --keep-going -j 2 test-for-races test-others

# Tests that would take minutes under the race detector. They start no goroutine, or those that the tests beside them have: in the publisher
# TestRandomFailures, in the monitor the other tests of maintenance.
long_with_races = Test(GroupsOfRandomInventories|ManyDeletedAgainAndAgain|OutageIsInTheLogOnce|PreferredSharesAtRandom|QuiesceReleasesTheDriver|RefusalsForADay|ReturnsAreSpread|SchemaOfAllFiles|SchemaOfEachKey|Storm|Strategies|Takes)
their_packages  = $$(grep -rlE '^func $(long_with_races)\(' --include='*_test.go' internal test | sed -E 's|^(.*)/[^/]*|./\1|' | sort -u)

.PHONY: test-for-races test-others
test-for-races:
	TMPDIR="$(test_dir)" go test $(same_flags) -race -p $$((2 * $$(nproc))) -skip '^$(long_with_races)$$' $$(go list ./... | grep -vE '$(without_races)')

test-others:
	TMPDIR="$(test_dir)" go test $(same_flags) -p $$(nproc) $$(go list ./... | grep -E '$(without_races)')
	TMPDIR="$(test_dir)" go test $(same_flags) -p $$(nproc) -run '^$(long_with_races)$$' $(their_packages)

.PHONY: golangci-lint
golangci-lint: tools-present
	mkdir -p $(BIN) # another make may build the same
	cd tools && flock $(BIN)/.golangci-lint go build -trimpath -o $(BIN)/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint

# cgo writes the folder of its source into what the build cache keeps, and -trimpath leaves the folder out of the cache's key: lint
# would read the files of another checkout, or fail where that is gone. The compiler's -D, which changes nothing, puts it back.
lint_flags := -trimpath '-gcflags=./internal/node/cudaproof=-D=$(CURDIR)'

# The tags of $(tags) are in .golangci.yml, too.
.PHONY: lint
lint: golangci-lint ## check style and tidiness (import rules are tests: test/walls)
	GOFLAGS="$(lint_flags)" $(BIN)/golangci-lint run ./...
	cd tools/release && GOFLAGS=-trimpath $(BIN)/golangci-lint run --config $(CURDIR)/.golangci.yml ./...
	git ls-files '*go.mod' | xargs -n 1 dirname | xargs -P 4 -I DIR sh -c 'cd DIR && go mod tidy -diff || { echo "make lint: DIR is not tidy"; exit 1; }'

.PHONY: goldens
goldens: tools-present ## write every golden file again: git diff shows what changed
	go test ./internal/core -run Health -update
	go test ./internal/operator/doctor -update
	go test ./internal/kubeadapter/deviceplugin -run Strategies -update
	cd test/chart && go test . -update
	go test ./internal/config/policy ./internal/core/health ./internal/core/health/xid ./internal/core/nvidia ./internal/nomadadapter ./internal/node/history ./internal/operator/report ./test/parity ./test/golden ./test/matrix ./test/metrics ./test/placement ./test/walls -update

.PHONY: fmt
fmt: ## format the code
	gofmt -w cmd internal test tools

.PHONY: conformance
conformance: build ## run the binaries under Nomad's and the kubelet's own device managers (root), compare placement and CDI, make chart
	test/conformance/run

.PHONY: chart
chart: tools-present ## render the Helm chart: equal to the manifest and its components, wrong values refused, each value documented
	cd test/chart && go test -trimpath -count=1 ./...

# VERSIONS="kubelet@v1.34.4 dra@v1.34.4 nomad@v1.10.5" runs these only; without it all of test/matrix/versions.go are run.
.PHONY: matrix
matrix: tools-present ## run the conformance tests with other versions of Kubernetes and Nomad (VERSIONS=...; root; 1.5 h)
	go run ./test/matrix $(VERSIONS)
	go test ./test/matrix -update

.PHONY: pictures
pictures: build ## look at the status page in Chromium, run the tests of the Prometheus rules, check the dashboard (root for apt)
	test/pictures/packages
	cd test/pictures && go test -trimpath -count=1 ./...

.PHONY: images
images: # what e2e runs
	$(MAKE) image BASE=debian
	$(MAKE) next-image BASE=debian

.PHONY: e2e
e2e: build ## make pictures, then run a real Nomad and a real Kubernetes on this machine (root; builds them once, about 15 min)
	test/e2e/packages
	$(MAKE) -j 2 --output-sync=target pictures images
	test/e2e/run

# .ci/run has it done while other steps wait: with nothing built yet it takes both of two CPUs a quarter of an hour.
.PHONY: prebuild
prebuild: golangci-lint ## build what lint, release-check and e2e run, each program once
	tools/release/tools nfpm helm syft crane cosign
	test/e2e/orchestrators

.PHONY: check-packages
check-packages: packages ## install, upgrade, remove and purge the packages in a Debian of their own (root, apt)
	root=$$(test/packages/needs) && go test -count=1 -tags packages ./test/packages -version $(VERSION) -packages $(DIST) -debian "$$root"

.PHONY: fuzz
fuzz: tools-present ## fuzz everything that parses, for FUZZTIME in all (default 10m)
	test/fuzz $(or $(FUZZTIME),10m)

.PHONY: storm
storm: tools-present ## the long runs: 1,000 restarts of either kubelet, 10,000 faults in half an hour (1 to 1.5 hours)
	TANDEM_STORM=1000 TANDEM_STORM_P99=1s go test ./internal/kubeadapter/deviceplugin -count=1 -run '^TestStorm$$' -v -timeout 60m
	TANDEM_STORM=200 go test ./internal/kubeadapter/dra/... ./internal/nomadadapter/agentapi -count=1 -run '^(TestStorm|TestRandomFailures|TestRandomTokens)$$' -timeout 60m
	TANDEM_STORM_FAULTS=10000 TANDEM_STORM_FOR=30m go test -race ./test/storm -count=1 -v -timeout 3h

.PHONY: bench
bench: tools-present ## run the benchmarks (2 min)
	go test -run '^$$' -bench . -benchmem -benchtime 300ms ./internal/... ./test/...

.PHONY: numbers
numbers: build ## measure the built binaries as processes, an idle minute, and other device plugins: PEER=path,path; on this node's GPUs: MACHINE= (20 min)
	go run ./test/numbers -bin $(BIN) -peer "$(PEER)" -machine "$(MACHINE)"

.PHONY: numbers-fleet
numbers-fleet: build ## measure gpu-fleet with simulated servers of 100, 1,000 and 3,000 nodes (20 min)
	go run ./test/numbers -bin $(BIN) -fleet 100,1000,3000 -idle 3m

# Without a GPU the checks end with one line and exit code 2.
.PHONY: hardware
hardware: build ## on a machine with a GPU: check both agents against nvidia-smi and CUDA, record the machine; changes nothing (docs/hardware.md)
	go build -o $(BIN)/hardware ./test/hardware
	@$(BIN)/hardware -bin $(BIN) -out $(DIST)/hardware

.PHONY: clean
clean: ## remove what was built
	rm -rf $(BIN) $(DIST)

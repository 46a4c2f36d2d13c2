package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// scanned is what syft writes, with its random namespace, its time and an order of its own.
func scanned(t *testing.T, namespace string, reversed bool) *document {
	t.Helper()
	packages := []string{
		`{"SPDXID":"SPDXRef-Package-go-module-m-1","name":"example.com/m","versionInfo":"v1.2.3","licenseDeclared":"NOASSERTION"}`,
		`{"SPDXID":"SPDXRef-Package-go-module-tandem","name":"github.com/tandem-gpu/tandem","versionInfo":"UNKNOWN"}`,
		`{"SPDXID":"SPDXRef-Package-deb-libc6","name":"libc6","versionInfo":"2.36","licenseDeclared":"LGPL-2.1-only"}`,
		`{"SPDXID":"SPDXRef-DocumentRoot","name":"folder","versionInfo":"","checksums":[{"algorithm":"SHA256","checksumValue":"0"}],"externalRefs":[]}`,
	}
	relationships := []string{
		`{"spdxElementId":"SPDXRef-DOCUMENT","relationshipType":"DESCRIBES","relatedSpdxElement":"SPDXRef-DocumentRoot"}`,
		`{"spdxElementId":"SPDXRef-DocumentRoot","relationshipType":"CONTAINS","relatedSpdxElement":"SPDXRef-Package-go-module-m-1"}`,
	}
	if reversed {
		packages[0], packages[2] = packages[2], packages[0]
		relationships[0], relationships[1] = relationships[1], relationships[0]
	}
	doc, err := parse([]byte(`{"spdxVersion":"SPDX-2.3","documentNamespace":"` + namespace + `","creationInfo":{"created":"` + namespace + `"},"packages":[` +
		strings.Join(packages, ",") + `],"relationships":[` + strings.Join(relationships, ",") + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

var linkedModule = map[[2]string]module{{"example.com/m", "v1.2.3"}: {Path: "example.com/m", Version: "v1.2.3", Expression: "MPL-2.0"}}

// finished is a document of an artefact as JSON.
func finished(t *testing.T, d *document, a artefact) string {
	t.Helper()
	if err := d.complete(t.Context(), a); err == nil || !strings.Contains(err.Error(), "no binary links it") {
		t.Fatalf("%v: without a binary the module is one too many", err)
	}
	if err := d.license(linkedModule, a.version); err != nil {
		t.Fatal(err)
	}
	content, err := json.MarshalIndent(d.joined(), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestSBOM(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tandem.tar.gz")
	if err := os.WriteFile(file, []byte("abc"), 0o644); err != nil {
		t.Fatal(err)
	}
	const digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" // of "abc"
	a := artefact{file: file, version: "2.0.0", tool: "syft-1.42.0", created: time.Unix(1700000000, 0).UTC()}
	one, two := finished(t, scanned(t, "random-1", false), a), finished(t, scanned(t, "random-2", true), a)
	if one != two {
		t.Errorf("two scans of one artefact differ:\n%s\n%s", one, two)
	}
	for _, want := range []string{
		digest, `"packageFileName": "tandem.tar.gz"`, `"created": "2023-11-14T22:13:20Z"`, `"Tool: syft-1.42.0"`, `"licenseConcluded": "MPL-2.0"`,
		`https://proxy.golang.org/example.com/m/@v/v1.2.3.zip`, `pkg:golang/github.com/tandem-gpu/tandem@v2.0.0`, `"licenseDeclared": "LGPL-2.1-only"`,
	} {
		if !strings.Contains(one, want) {
			t.Errorf("no %s in %s", want, one)
		}
	}
	a.image, a.platform, a.manifest = "k8s-gpu", "linux/arm64", "sha256:feed"
	image := finished(t, scanned(t, "random", false), a)
	for _, want := range []string{digest, `"checksumValue": "feed"`, `pkg:oci/k8s-gpu@sha256%3Afeed?arch=arm64`, `"name": "tandem.tar.gz linux/arm64"`, "SPDXRef-Archive"} {
		if !strings.Contains(image, want) && !strings.Contains(image, strings.ReplaceAll(want, "&", `\u0026`)) {
			t.Errorf("no %s in %s", want, image)
		}
	}
}

func TestSBOMRefuses(t *testing.T) {
	linked := map[[2]string]module{{"example.com/m", "v1.2.4"}: {}}
	err := scanned(t, "", false).license(linked, "2.0.0")
	for _, want := range []string{"example.com/m v1.2.3: no binary links it", "example.com/m v1.2.4: the document does not have it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := (&document{object: object{}}).describe(artefact{}, ""); err == nil {
		t.Error("a document without a root is accepted")
	}
}

func TestProvenance(t *testing.T) {
	folder := tree(t, map[string]string{"a.zip": "abc"})
	output := filepath.Join(folder, "provenance.json")
	commit := strings.Repeat("c", 40)
	args := []string{
		"-output", output, "-version", "2.0.0", "-commit", commit, "-tag", "v2.0.0", "-base", "debian", "-arches", "amd64 arm64",
		"-material", "pkg:deb/debian/libc6@2.36?arch=amd64=feed", "-tool", "cc-amd64=gcc 12", "-subject", "image:2.0.0=beef",
		"-builder", "https://example.com/workflow", "-invocation", "https://example.com/run/1", "-modified", filepath.Join(folder, "a.zip"),
	}
	if err := provenanceCommand(t.Context(), args); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Type          string `json:"_type"`
		PredicateType string
		Subject       []struct {
			Name   string
			Digest map[string]string
		}
		Predicate struct {
			BuildDefinition struct {
				ExternalParameters   struct{ Command, Version, Tag string }
				InternalParameters   struct{ ModifiedWorkingTree bool }
				ResolvedDependencies []struct {
					URI    string
					Digest map[string]string
				}
			}
			RunDetails struct {
				Builder struct {
					ID      string
					Version map[string]string
				}
				Metadata struct{ InvocationID string }
			}
		}
	}
	content, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(bytes.NewReader(content)).Decode(&got); err != nil {
		t.Fatal(err)
	}
	build, run := got.Predicate.BuildDefinition, got.Predicate.RunDetails
	if got.Type != "https://in-toto.io/Statement/v1" || got.PredicateType != "https://slsa.dev/provenance/v1" {
		t.Errorf("types %s, %s", got.Type, got.PredicateType)
	}
	if len(got.Subject) != 2 || got.Subject[0].Digest["sha256"] != "beef" || got.Subject[1].Name != "a.zip" || len(got.Subject[1].Digest["sha256"]) != 64 {
		t.Errorf("subjects %v", got.Subject)
	}
	if build.ExternalParameters.Command != `make release BASE=debian ARCHES="amd64 arm64"` || !build.InternalParameters.ModifiedWorkingTree {
		t.Errorf("parameters %+v, %+v", build.ExternalParameters, build.InternalParameters)
	}
	if d := build.ResolvedDependencies; len(d) != 2 || d[0].URI != "git+https://github.com/tandem-gpu/tandem@refs/tags/v2.0.0" ||
		d[0].Digest["gitCommit"] != commit || d[1].URI != "pkg:deb/debian/libc6@2.36?arch=amd64" || d[1].Digest["sha256"] != "feed" {
		t.Errorf("dependencies %v", d)
	}
	if run.Builder.ID != "https://example.com/workflow" || run.Builder.Version["cc-amd64"] != "gcc 12" || run.Metadata.InvocationID == "" {
		t.Errorf("run %+v", run)
	}
	for _, bad := range [][]string{{"-commit", "abc", folder + "/a.zip"}, {"-commit", commit}, {"-commit", commit, folder + "/none"}, {"-tool", "x"}} {
		if err := provenanceCommand(t.Context(), append([]string{"-output", output}, bad...)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

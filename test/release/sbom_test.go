//go:build release

package release

import (
	"debug/buildinfo"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// spdx is what these tests read of an SPDX document.
type spdx struct {
	Name, SPDXVersion, DocumentNamespace string
	CreationInfo                         struct {
		Created  time.Time
		Creators []string
	}
	Packages []struct {
		SPDXID, Name, VersionInfo, PackageFileName, DownloadLocation, LicenseConcluded, LicenseDeclared string
		Checksums                                                                                       []struct{ Algorithm, ChecksumValue string }
		ExternalRefs                                                                                    []struct{ ReferenceType, ReferenceLocator string }
	}
	Files         []struct{ FileName string }
	Relationships []struct{ SPDXElementID, RelationshipType, RelatedSPDXElement string }
}

// Every SBOM has each module that the binaries record, with version, license and source, and the digest of its artefact.
func TestSBOMs(t *testing.T) {
	namespaces := map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		binaries := filepath.Join(dist(t), "linux-"+arch)
		documents, images := map[string]string{}, map[string]bool{} // to artefacts; which of these are images
		for _, binary := range []string{"k8s-gpu", "gpu-fleet"} {
			image := filepath.Join(dist(t), binary+"-"+makeVersion(t)+".oci.tar")
			documents[image+"."+arch+".spdx.json"], images[image] = image, true
		}
		for _, artefact := range artefacts(t, arch) {
			documents[artefact+".spdx.json"] = artefact
		}
		for path, artefact := range documents {
			t.Run(filepath.Base(path), func(t *testing.T) {
				var doc spdx
				decode(t, path, &doc)
				if other := namespaces[doc.DocumentNamespace]; other != "" {
					t.Errorf("the document has the namespace of %s", other)
				}
				namespaces[doc.DocumentNamespace] = path
				doc.checkArtefact(t, artefact)
				for _, name := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
					if base := filepath.Base(artefact); strings.Contains(base, name) || strings.HasSuffix(base, ".tar.gz") {
						doc.checkModules(t, filepath.Join(binaries, name))
					}
				}
				if images[artefact] {
					doc.checkImage(t, arch)
				}
			})
		}
	}
}

func (d spdx) checkArtefact(t *testing.T, artefact string) {
	t.Helper()
	if d.SPDXVersion != "SPDX-2.3" || d.CreationInfo.Created.IsZero() || len(d.CreationInfo.Creators) != 2 {
		t.Errorf("header %+v", d)
	}
	if strings.Contains(d.DocumentNamespace, "anchore") {
		t.Errorf("namespace %s", d.DocumentNamespace)
	}
	described := 0
	for _, r := range d.Relationships {
		if r.RelationshipType == "DESCRIBES" {
			described++
		}
	}
	found := 0
	for _, p := range d.Packages {
		if p.PackageFileName == filepath.Base(artefact) {
			found++
			if len(p.Checksums) != 1 || p.Checksums[0].ChecksumValue != digestOf(t, artefact) || p.VersionInfo != makeVersion(t) {
				t.Errorf("the artefact is %+v, its digest %s", p, digestOf(t, artefact))
			}
		}
	}
	if described != 1 || found != 1 {
		t.Errorf("%d packages described, %d of the artefact, want 1", described, found)
	}
}

func (d spdx) checkModules(t *testing.T, binary string) {
	t.Helper()
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	type key struct{ name, version string }
	has := map[key]bool{}
	for _, p := range d.Packages {
		if p.LicenseConcluded != "" && p.LicenseConcluded != "NOASSERTION" && len(p.ExternalRefs) > 0 {
			has[key{p.Name, p.VersionInfo}] = true
		}
	}
	want := []key{{"stdlib", info.GoVersion}, {info.Main.Path, makeVersion(t)}}
	for _, m := range info.Deps {
		want = append(want, key{m.Path, m.Version})
	}
	for _, k := range want {
		if !has[k] {
			t.Errorf("%s links %s %s, which the SBOM does not have with a license and a package URL", filepath.Base(binary), k.name, k.version)
		}
	}
	if len(want) < 20 {
		t.Errorf("%s records %d modules", binary, len(want))
	}
}

// checkImage looks for glibc, by which a scanner finds what the base has.
func (d spdx) checkImage(t *testing.T, arch string) {
	t.Helper()
	for _, p := range d.Packages {
		if p.Name != "libc6" {
			continue
		}
		for _, r := range p.ExternalRefs {
			if r.ReferenceType == "purl" && strings.HasPrefix(r.ReferenceLocator, "pkg:deb/debian/libc6@2.") && strings.Contains(r.ReferenceLocator, "arch="+arch) &&
				strings.Contains(p.LicenseDeclared, "LGPL-2.1") {
				return
			}
		}
	}
	t.Errorf("no libc6 with a package URL for %s and a license", arch)
}

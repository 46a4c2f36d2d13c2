package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	repository = "https://github.com/tandem-gpu/tandem"
	mainModule = "github.com/tandem-gpu/tandem"
	supplier   = "Organization: Tandem"
)

// object is a JSON object of which only some keys are changed.
type object map[string]any

// document is an SPDX 2.3 document.
type document struct {
	object        `json:"-"`
	packages      []object
	files         []object
	relationships []object
}

// artefact is the file that an SBOM describes.
type artefact struct {
	file     string   // its path
	version  string   // of Tandem
	tool     string   // that wrote the document
	binaries []string // in it
	created  time.Time
	// Of an image in an archive: its name, its platform and the digest of its manifest.
	image, platform, manifest string
}

// sbomCommand completes an SPDX document of syft: the artefact with its digest, license and source of each module. Syft's random and
// current values are replaced by those of the artefact.
func sbomCommand(ctx context.Context, args []string) error {
	var a artefact
	flags := flag.NewFlagSet("sbom", flag.ContinueOnError)
	raw := flags.String("raw", "", "the `FILE` that syft has written")
	output := flags.String("output", "", "the `FILE` to write")
	epoch := flags.String("epoch", "", "the time of the commit in `SECONDS`")
	flags.StringVar(&a.file, "artefact", "", "the `FILE` that the SBOM describes")
	flags.StringVar(&a.version, "version", "", "the `VERSION` of Tandem")
	flags.StringVar(&a.tool, "tool", "", "`NAME-VERSION` of the program that wrote the document")
	flags.StringVar(&a.image, "image", "", "the `NAME` of an image, without registry")
	flags.StringVar(&a.platform, "platform", "", "the `OS/ARCH` of an image")
	flags.StringVar(&a.manifest, "manifest", "", "the `sha256:DIGEST` of an image's manifest")
	if err := flags.Parse(args); err != nil {
		return err
	}
	seconds, err := strconv.ParseInt(*epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("-epoch: %w", err)
	}
	a.created, a.binaries = time.Unix(seconds, 0).UTC(), flags.Args()
	content, err := os.ReadFile(*raw)
	if err != nil {
		return err
	}
	doc, err := parse(content)
	if err == nil {
		err = doc.complete(ctx, a)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", a.file, err)
	}
	return writeJSON(*output, doc.joined())
}

func parse(content []byte) (*document, error) {
	var parts struct{ Packages, Files, Relationships []object }
	doc := &document{}
	if err := errors.Join(json.Unmarshal(content, &doc.object), json.Unmarshal(content, &parts)); err != nil {
		return nil, err
	}
	doc.packages, doc.files, doc.relationships = parts.Packages, parts.Files, parts.Relationships
	return doc, nil
}

// complete changes a document into one of the artefact.
func (d *document) complete(ctx context.Context, a artefact) error {
	digest, err := digestOf(a.file)
	if err != nil {
		return err
	}
	name := filepath.Base(a.file)
	if a.platform != "" {
		name += " " + a.platform
	}
	d.object["name"] = name
	d.object["documentNamespace"] = repository + "/spdx/" + strings.ReplaceAll(name, " ", "/") + "/" + digest
	d.object["creationInfo"] = object{
		"created": a.created.Format(time.RFC3339), "creators": []string{supplier, "Tool: " + a.tool},
	}
	if err := d.describe(a, digest); err != nil {
		return err
	}
	linked := map[[2]string]module{}
	for _, binary := range a.binaries {
		modules, err := modulesOf(ctx, binary)
		if err != nil {
			return err
		}
		for _, m := range modules {
			linked[[2]string{m.Path, m.Version}] = m
		}
	}
	return d.license(linked, a.version)
}

// describe makes the root of the document the artefact.
func (d *document) describe(a artefact, digest string) error {
	root := d.root()
	if root == nil {
		return errors.New("the document describes no package")
	}
	root["versionInfo"], root["supplier"] = a.version, supplier
	root["licenseDeclared"], root["licenseConcluded"] = "Apache-2.0", "NOASSERTION"
	file := object{
		"SPDXID": "SPDXRef-Archive", "name": filepath.Base(a.file), "packageFileName": filepath.Base(a.file), "versionInfo": a.version,
		"supplier": supplier, "downloadLocation": "NOASSERTION", "filesAnalyzed": false, "copyrightText": "NOASSERTION",
		"licenseDeclared": "Apache-2.0", "licenseConcluded": "NOASSERTION", "checksums": sha256Checksum(digest), "primaryPackagePurpose": "ARCHIVE",
	}
	if a.platform == "" {
		for _, key := range []string{"name", "packageFileName", "checksums", "primaryPackagePurpose"} {
			root[key] = file[key]
		}
		delete(root, "externalRefs")
		return nil
	}
	_, architecture, _ := strings.Cut(a.platform, "/")
	root["name"], root["checksums"] = "ghcr.io/tandem-gpu/"+a.image, sha256Checksum(strings.TrimPrefix(a.manifest, "sha256:"))
	root["externalRefs"] = reference("pkg:oci/" + a.image + "@" + strings.Replace(a.manifest, ":", "%3A", 1) + "?arch=" + architecture +
		"&repository_url=ghcr.io/tandem-gpu/" + a.image + "&tag=" + a.version)
	d.packages = append(d.packages, file)
	d.relationships = append(d.relationships, object{
		"spdxElementId": "SPDXRef-Archive", "relationshipType": "CONTAINS", "relatedSpdxElement": root["SPDXID"],
	})
	return nil
}

// root returns the package that the document describes.
func (d *document) root() object {
	for _, r := range d.relationships {
		if r["relationshipType"] == "DESCRIBES" {
			i := slices.IndexFunc(d.packages, func(p object) bool { return p["SPDXID"] == r["relatedSpdxElement"] })
			if i >= 0 {
				return d.packages[i]
			}
		}
	}
	return nil
}

// license adds license and source to each module, and reports modules that are missing.
func (d *document) license(linked map[[2]string]module, version string) error {
	seen := map[[2]string]bool{}
	var errs []error
	for _, p := range d.packages {
		id, _ := p["SPDXID"].(string)
		if !strings.HasPrefix(id, "SPDXRef-Package-go-module-") {
			continue
		}
		path, _ := p["name"].(string)
		at, _ := p["versionInfo"].(string)
		if path == mainModule {
			p["versionInfo"], p["supplier"] = version, supplier
			p["licenseDeclared"], p["licenseConcluded"] = "Apache-2.0", "Apache-2.0"
			// syft's have no version.
			p["externalRefs"] = reference("pkg:golang/" + mainModule + "@v" + version)
			continue
		}
		m, ok := linked[[2]string{path, at}]
		if !ok {
			errs = append(errs, fmt.Errorf("%s %s: no binary links it", path, at))
			continue
		}
		seen[[2]string{path, at}] = true
		p["licenseDeclared"], p["licenseConcluded"], p["downloadLocation"] = m.Expression, m.Expression, m.source()
	}
	for key := range linked {
		if !seen[key] {
			errs = append(errs, fmt.Errorf("%s %s: the document does not have it", key[0], key[1]))
		}
	}
	return errors.Join(errs...)
}

// joined is the document in one order.
func (d *document) joined() object {
	for _, list := range [][]object{d.packages, d.files, d.relationships} {
		slices.SortFunc(list, func(a, b object) int { return cmp.Compare(sortKey(a), sortKey(b)) })
	}
	d.object["packages"], d.object["relationships"] = d.packages, d.relationships
	if d.files != nil {
		d.object["files"] = d.files
	}
	return d.object
}

func sortKey(o object) string {
	return fmt.Sprint(o["SPDXID"], o["spdxElementId"], " ", o["relationshipType"], " ", o["relatedSpdxElement"])
}

func sha256Checksum(digest string) []object {
	return []object{{"algorithm": "SHA256", "checksumValue": digest}}
}

func reference(purl string) []object {
	return []object{{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}}
}

func digestOf(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	return hex.EncodeToString(hash.Sum(nil)), errors.Join(err, file.Close())
}

func writeJSON(path string, value any) error {
	content, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(content, '\n'), 0o644)
}

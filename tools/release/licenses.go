package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

var errNoLicense = errors.New("no license file")

// licenseFiles returns the license files of the nearest folder, from that of the package up to that of its module, and the notices and
// patent grants of all folders between.
func licenseFiles(dir, root string) ([]string, error) {
	var files []string
	found := false
	for d := dir; d == root || strings.HasPrefix(d, root+string(filepath.Separator)); d = filepath.Dir(d) {
		entries, err := os.ReadDir(d)
		if err != nil {
			return nil, err
		}
		here := false
		for _, e := range entries {
			name := strings.ToUpper(e.Name())
			if e.IsDir() || strings.HasSuffix(name, ".GO") {
				continue
			}
			license := hasPrefix(name, "LICENSE", "LICENCE", "COPYING", "COPYRIGHT")
			if license && !found || hasPrefix(name, "NOTICE", "PATENTS") {
				files = append(files, filepath.Join(d, e.Name()))
			}
			here = here || license
		}
		found = found || here
	}
	if !found {
		return nil, fmt.Errorf("%s: %w", dir, errNoLicense)
	}
	return files, nil
}

func hasPrefix(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

// phrases are the texts by which a license is recognised. A license whose text contains that of another one is before it.
var phrases = []struct{ id, text string }{
	{businessSource, "Business Source License 1.1"},
	{"MPL-2.0", "Mozilla Public License"},
	{"Apache-2.0", "Apache License"},
	{"ISC", "Permission to use, copy, modify, and/or distribute this software"},
	{"ISC", "Permission to use, copy, modify, and distribute this software"},
	{"MIT", "Permission is hereby granted, free of charge"},
	{"BSD-3-Clause", "Neither the name"},
	{"BSD-3-Clause", "contributors may be used to endorse"},
	{"BSD-2-Clause", "Redistributions in binary form"},
}

// businessSource is the license of those packages of Nomad's plugin API that are not under the MPL. No other module may have it.
const businessSource, nomad = "BUSL-1.1", "github.com/hashicorp/nomad"

// expression returns the SPDX expression of license files: each license in them applies.
func expression(files []string) (string, error) {
	var ids []string
	for _, file := range files {
		if hasPrefix(strings.ToUpper(filepath.Base(file)), "NOTICE", "PATENTS") {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		text := strings.Join(strings.Fields(string(content)), " ")
		of := idsIn(text)
		if len(of) == 0 {
			return "", fmt.Errorf("%s: unknown license", file)
		}
		ids = append(ids, of...)
	}
	slices.Sort(ids)
	return strings.Join(slices.Compact(ids), " AND "), nil
}

func idsIn(text string) []string {
	var ids []string
	for _, l := range phrases {
		if !strings.Contains(text, l.text) || slices.Contains(ids, l.id) || l.id == "BSD-2-Clause" && slices.Contains(ids, "BSD-3-Clause") {
			continue
		}
		ids = append(ids, l.id)
		if l.id == businessSource || l.id == "MPL-2.0" {
			break // these texts name other licenses
		}
	}
	return ids
}

// licensesCommand writes the license of Tandem and one file with those of all that a binary links.
func licensesCommand(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return errors.New("want BINARY FOLDER")
	}
	modules, err := modulesOf(ctx, args[0])
	if err != nil {
		return err
	}
	own, err := os.ReadFile("LICENSE")
	if err != nil {
		return err
	}
	third, err := thirdParty(filepath.Base(args[0]), modules)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(args[1], 0o755); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(args[1], "LICENSE"), own, 0o644),
		os.WriteFile(filepath.Join(args[1], "THIRD-PARTY-LICENSES.txt"), third, 0o644),
	)
}

// thirdParty is a table of modules, then each text once with the modules to which it applies.
func thirdParty(binary string, modules []module) ([]byte, error) {
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s links packages of these modules, unmodified. Tandem itself is licensed under Apache-2.0 (LICENSE).\n", binary)
	out.WriteString("The source code of each, also of those under MPL-2.0, is at the address below it.\n\n")
	var texts []string // in the order of their first module
	users := map[string][]string{}
	for _, m := range modules {
		fmt.Fprintf(&out, "%s %s\n    %s\n    %s\n", m.Path, m.Version, m.Expression, m.source())
		for _, file := range m.Files {
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			text := strings.TrimSpace(strings.ReplaceAll(string(content), "\r\n", "\n"))
			if users[text] == nil {
				texts = append(texts, text)
			}
			users[text] = append(users[text], m.Path+" "+m.Version+" ("+filepath.Base(file)+")")
		}
	}
	for _, text := range texts {
		rule := strings.Repeat("=", 80)
		fmt.Fprintf(&out, "\n%s\n%s\n%s\n\n%s\n", rule, strings.Join(users[text], "\n"), rule, text)
	}
	return out.Bytes(), nil
}

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tree writes files into a folder of the test.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestExpression(t *testing.T) {
	const (
		mit    = "Permission is hereby granted,\n  free of charge, to any person"
		apache = "Apache License\nVersion 2.0"
		bsd2   = "Redistributions in binary form must reproduce"
		bsd3   = bsd2 + "\nNeither the name of Google"
		mpl    = "Mozilla Public License, version 2.0 ... GNU General Public License ... Apache License"
		busl   = "Business Source License 1.1 ... Mozilla Public License"
	)
	for name, c := range map[string]struct {
		files map[string]string
		want  string // an error if it begins with "!"
	}{
		"one":                         {map[string]string{"LICENSE": mit}, "MIT"},
		"three clauses contain two":   {map[string]string{"LICENSE": bsd3}, "BSD-3-Clause"},
		"two clauses":                 {map[string]string{"LICENSE": bsd2}, "BSD-2-Clause"},
		"a license that names others": {map[string]string{"LICENSE": mpl}, "MPL-2.0"},
		"the license of Nomad":        {map[string]string{"LICENSE": busl}, "BUSL-1.1"},
		"two in one file":             {map[string]string{"LICENSE": mit + apache}, "Apache-2.0 AND MIT"},
		"two files":                   {map[string]string{"LICENSE": mpl, "sub/LICENSE": busl}, "BUSL-1.1 AND MPL-2.0"},
		"a notice is no license":      {map[string]string{"LICENSE": mit, "NOTICE": apache, "PATENTS": "x"}, "MIT"},
		"unknown":                     {map[string]string{"LICENSE": "all rights reserved"}, "!unknown license"},
	} {
		t.Run(name, func(t *testing.T) {
			root := tree(t, c.files)
			var files []string
			for file := range c.files {
				files = append(files, filepath.Join(root, file))
			}
			got, err := expression(files)
			if want, bad := strings.CutPrefix(c.want, "!"); bad && (err == nil || !strings.Contains(err.Error(), want)) || !bad && (err != nil || got != want) {
				t.Errorf("%q, %v; want %s", got, err, c.want)
			}
		})
	}
}

// The nearest license counts, and all notices up to the root of the module; never a file above it.
func TestLicenseFiles(t *testing.T) {
	root := tree(t, map[string]string{
		"LICENSE": "of something else", "m/LICENSE": "of the module", "m/NOTICE": "", "m/license.go": "package m",
		"m/plugins/LICENSE.txt": "of a part", "m/plugins/PATENTS": "", "m/plugins/base/base.go": "package base", "m/lib/lib.go": "package lib",
		"none/x.go": "package none",
	})
	for dir, want := range map[string]string{
		"m": "LICENSE NOTICE", "m/lib": "LICENSE NOTICE", "m/plugins/base": "plugins/LICENSE.txt plugins/PATENTS NOTICE",
	} {
		files, err := licenseFiles(filepath.Join(root, dir), filepath.Join(root, "m"))
		got := strings.ReplaceAll(strings.Join(files, " "), root+"/m/", "")
		if err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", dir, got, err, want)
		}
	}
	if files, err := licenseFiles(root+"/none", root+"/none"); !errors.Is(err, errNoLicense) {
		t.Errorf("%q, %v", files, err)
	}
}

// Each text is printed once, under the modules to which it applies; each module has its source.
func TestThirdParty(t *testing.T) {
	root := tree(t, map[string]string{"a": "text one\n", "b": "text one\r\n", "c": "text two"})
	out, err := thirdParty("nomad-gpu", []module{
		{Path: "example.com/A", Version: "v1.0.0", Files: []string{root + "/a"}, Expression: "MIT"},
		{Path: "example.com/b", Version: "v2.0.0-RC", Files: []string{root + "/b", root + "/c"}, Expression: "MPL-2.0"},
		{Path: standard, Version: "go1.26.8", Expression: "BSD-3-Clause"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for want, count := range map[string]int{
		"text one": 1, "text two": 1, "example.com/A v1.0.0 (a)\nexample.com/b v2.0.0-RC (b)\n": 1, "    MPL-2.0\n": 1,
		"https://proxy.golang.org/example.com/!a/@v/v1.0.0.zip\n": 1, "https://proxy.golang.org/example.com/b/@v/v2.0.0-!r!c.zip\n": 1,
		"https://go.dev/dl/go1.26.8.src.tar.gz\n": 1,
	} {
		if got := strings.Count(string(out), want); got != count {
			t.Errorf("%d times %q, want %d:\n%s", got, want, count, out)
		}
	}
}

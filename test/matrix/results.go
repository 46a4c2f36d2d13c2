package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// Results are the last ones of each version, as they are in the file.
type Results []Result

func load(path string) (Results, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var results Results
	if err := json.Unmarshal(text, &results); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return results, nil
}

// with returns the results with another one for its version.
func (all Results) with(r Result) Results {
	all = slices.DeleteFunc(slices.Clone(all), func(o Result) bool { return o.Subject == r.Subject && o.Version == r.Version })
	all = append(all, r)
	slices.SortFunc(all, func(a, b Result) int {
		return strings.Compare(a.Subject+a.Version, b.Subject+b.Version)
	})
	return all
}

func (all Results) save(path string) error {
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

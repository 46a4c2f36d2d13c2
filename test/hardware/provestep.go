package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// proveAll proves each device, with the programs in turn: both have the same proof. On an idle machine a proof that can't run is a failure of the check, too.
func (r *run) proveAll(ctx context.Context) {
	const part = "prove"
	if r.prove == 0 {
		r.add(part, "all", LeftOut, "by -prove=0")
		return
	}
	for i, id := range r.devices() {
		name := agents[i%len(agents)]
		text, err := r.verb(ctx, name, r.dir, "prove-gpu", "--gpu", id, "--timeout", r.prove.String())
		r.files["prove-"+id+".txt"] = text
		if err != nil && strings.Contains(err.Error(), "library can't be loaded") {
			r.add(part, "all", LeftOut, err.Error())
			return
		}
		r.check(part, id+", "+name, proved(text), err)
	}
}

// proved is the last line of a proof as text.
func proved(output string) string {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	var result struct {
		Summary string
		Values  map[string]float64
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &result); err != nil {
		return "the last line is no JSON: " + err.Error()
	}
	text := result.Summary
	for _, name := range slices.Sorted(maps.Keys(result.Values)) {
		text += fmt.Sprintf(", %s %.1f", name, result.Values[name])
	}
	return text
}

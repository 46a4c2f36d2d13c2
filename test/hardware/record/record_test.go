package record_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/hardware/record"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func recordMachine(t *testing.T, m *simdriver.Machine) record.Recording {
	t.Helper()
	lib := nvml.New(nvml.WithLibraryPath(m.Library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer func() {
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			t.Error(ret)
		}
	}()
	r, err := record.Record(lib, m.Root+"/sys")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// unreadable reports whether NVML does not return the value of a key on a GPU as it is now (test/simdriver/README.md).
func unreadable(key string, gpu record.Section, profiles bool) bool {
	switch key {
	case "process", "unsupported": // the first is of the node; the second is in the answers
		return true
	case "numa":
		return slices.Equal(gpu["numa"], []string{"-1"})
	case "nvlink_version", "nvlink_speed": // of links, of which a machine file has those between GPUs
		return slices.Equal(gpu["name"], []string{"NVIDIA H200"})
	case "mig_slices", "max_mig": // without MIG mode, NVML's count is 0, and the recording has that of the smallest profile
		return !profiles
	case "utilization_gpu", "utilization_memory", "encoder", "decoder", "compute_mode", "cores":
		return slices.Equal(gpu["mig"], []string{"yes"})
	}
	return strings.HasPrefix(key, "remap") && len(gpu["instance"]) > 0
}

// gpusOf are the values of each GPU: its own, and the defaults.
func gpusOf(text string) map[string]record.Section {
	all := record.Sections(text)
	gpus := map[string]record.Section{}
	for head, section := range all {
		if strings.HasPrefix(head, "gpu ") {
			merged := record.Section{}
			maps.Copy(merged, all["defaults"])
			maps.Copy(merged, section)
			maps.DeleteFunc(merged, func(_ string, v []string) bool { return slices.Equal(v, []string{"none"}) })
			gpus[head] = merged
		}
	}
	return gpus
}

// A machine that is recorded and played is the same machine: a second recording is equal to the first, and what the first has is in the
// machine file that was played.
func TestRoundTrip(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			original, err := simdriver.Text(name)
			if err != nil {
				t.Fatal(err)
			}
			first := recordMachine(t, simdriver.Start(t, name))
			again := recordMachine(t, simdriver.StartText(t, first.Text))
			if first.Text != again.Text {
				t.Errorf("recorded:\n%s\nplayed and recorded:\n%s", first.Text, again.Text)
			}
			want, got := gpusOf(original), gpusOf(first.Text)
			if len(want) != len(got) {
				t.Fatalf("%d GPUs of %d", len(got), len(want))
			}
			for head := range want {
				compareSections(t, head, want[head], got[head], strings.Contains(original, "[profile "))
			}
			checkProfiles(t, original, first.Text)
			checkLinks(t, original, first.Text, len(want))
			if w, g := record.Sections(original)["machine"], record.Sections(first.Text)["machine"]; !maps.EqualFunc(w, g, slices.Equal) {
				t.Errorf("machine %v, recorded %v", w, g)
			}
		})
	}
}

func compareSections(t *testing.T, head string, want, got record.Section, profiles bool) {
	t.Helper()
	for key, value := range want {
		if recorded := got[key]; !slices.Equal(recorded, value) && !unreadable(key, want, profiles) {
			t.Errorf("[%s] %s = %q, recorded %q", head, key, value, recorded)
		}
	}
	for key, value := range got {
		if want[key] == nil && key != "minor" { // the slot, unless a file has it
			t.Errorf("[%s] %s = %q is only recorded", head, key, value)
		}
	}
}

// checkProfiles: a profile that is a part of a GPU instance is recorded only if an instance has it.
func checkProfiles(t *testing.T, original, recorded string) {
	t.Helper()
	want, got := record.Sections(original), record.Sections(recorded)
	for head, profile := range want {
		if !strings.HasPrefix(head, "profile ") || profile["compute_slices"] != nil && !strings.Contains(original, "instance = "+head[len("profile "):]) {
			continue
		}
		if !maps.EqualFunc(profile, got[head], slices.Equal) {
			t.Errorf("[%s] %v, recorded %v", head, profile, got[head])
		}
	}
}

// checkLinks compares the connections of each pair of GPUs.
func checkLinks(t *testing.T, original, recorded string, gpus int) {
	t.Helper()
	want, got := record.Sections(original)["links"], record.Sections(recorded)["links"]
	if gpus == 1 {
		return // there is no pair
	}
	if !slices.Equal(want["switches"], got["switches"]) && got["switches"] != nil {
		t.Errorf("switches %q, recorded %q", want["switches"], got["switches"])
	}
	for _, key := range []string{"topology", "nvlink"} {
		if w, g := pairs(t, want[key], gpus), pairs(t, got[key], gpus); !maps.Equal(w, g) {
			t.Errorf("%s %v, recorded %v", key, w, g)
		}
	}
}

// pairs are the values of each pair of GPUs. Later lines win.
func pairs(t *testing.T, lines []string, gpus int) map[[2]int]string {
	t.Helper()
	set := func(word string) (all []int) {
		first, last := 0, gpus-1
		if n, _ := fmt.Sscanf(word, "%d-%d", &first, &last); n == 1 {
			last = first
		} else if n == 0 && word != "all" {
			t.Errorf("set %q", word)
		}
		for i := first; i <= last; i++ {
			all = append(all, i)
		}
		return all
	}
	of := map[[2]int]string{}
	for _, line := range lines {
		words := strings.Fields(line)
		for _, a := range set(words[1]) {
			for _, b := range set(words[len(words)-1]) {
				if a != b {
					of[[2]int{min(a, b), max(a, b)}] = words[0]
				}
			}
		}
	}
	return of
}

// A machine with faults: what a driver refuses is in the answers, with its return code, and not in the machine.
func TestAnswers(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	if err := m.Fail(simdriver.GPU(3), "nvmlDeviceGetSerial", "NO_PERMISSION", simdriver.Always); err != nil {
		t.Fatal(err)
	}
	r := recordMachine(t, m)
	i := slices.IndexFunc(r.Answers, func(a record.Answer) bool { return a.GPU == 3 && a.Key == "serial" })
	if i < 0 || r.Answers[i].Return != "NO_PERMISSION" || r.GPUs[3].Values["serial"] != "" {
		t.Errorf("answer %d: %+v", i, r.Answers[i])
	}
	model, err := simdriver.Text(record.Model(r))
	if err != nil {
		t.Fatal(err)
	}
	if differences := record.Compare(r, model); len(differences) > 0 {
		t.Errorf("the machine differs from its file: %+v", differences)
	}
	if err := m.Set(0, "max_clock_sm", "1755 MHz"); err != nil {
		t.Fatal(err)
	}
	if err := m.Set(0, "recovery_action", "none"); err != nil {
		t.Fatal(err)
	}
	want := []record.Difference{
		{Key: "max_clock_sm", Function: "nvmlDeviceGetMaxClockInfo(1)", Driver: "1755", Simulated: "1980"},
		{Key: "recovery_action", Function: "nvmlDeviceGetFieldValues(230)", Driver: "NOT_SUPPORTED", Simulated: "0"},
	}
	if got := record.Compare(recordMachine(t, m), model); !slices.Equal(got, want) {
		t.Errorf("differences %+v", got)
	}
}

func TestAnonymous(t *testing.T) {
	text, err := simdriver.Text("a100-mig")
	if err != nil {
		t.Fatal(err)
	}
	anonymous := record.Anonymous(text)
	before, after := gpusOf(text), gpusOf(anonymous)
	for head, section := range before {
		for _, key := range []string{"uuid", "serial", "instance"} {
			for _, value := range section[key] {
				if words := strings.Split(value, "uuid="); strings.Contains(anonymous, words[len(words)-1]) {
					t.Errorf("[%s] %s = %s is in the anonymous file", head, key, value)
				}
			}
		}
		if !slices.Equal(section["pci"], after[head]["pci"]) || len(section["instance"]) != len(after[head]["instance"]) {
			t.Errorf("[%s] %v is %v", head, section, after[head])
		}
	}
	recordMachine(t, simdriver.StartText(t, anonymous)) // it can be played
}

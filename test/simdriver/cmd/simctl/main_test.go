package main

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestCommands(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	tests := []struct{ command, out, err string }{
		{"mig 0 3g.40gb 1g.10gb x3", "", ""},
		{"instance MIG-506f9790-f629-590a-bc7f-30f284452c1b used=3MiB", "", ""},
		{"show", "uuid=MIG-506f9790-f629-590a-bc7f-30f284452c1b used=3MiB", ""},
		{"instance MIG-506f9790 used=3MiB", "", "no instance MIG-506f9790"},
		{"lose 3", "", ""},
		{"restore 3", "", ""},
		{"xid 0 94 1 0", "", ""},
		{"operational 0 severity=40 xid=94", "", ""},
		{"operational 0 weight=40", "", `"weight=40" is none of module, severity`},
		{"set 2 temperature 80 C", "", ""},
		{"fail 1 nvmlDeviceGetUUID UNKNOWN 2", "", ""},
		{"faults", "fail 1 nvmlDeviceGetUUID UNKNOWN times=2", ""},
		{"heal 1", "", ""},
		{"show", "temperature = 80 C", ""},
		{"violations", "", ""},
		{"lose", "", "lose: wrong number of words"},
		{"lose three", "", `lose: "three" is not a number`},
		{"lose 99", "", "lose: no section [gpu 99]"},
		{"set 2 temprature 80", "", `no GPU key "temprature"`},
		{"mig 0 9g.90gb", "", "no [profile 9g.90gb]"},
		{"holders", "", ""},
		{"module 600.1.2", "", ""},
		{"library 600.1.2", "", ""},
		{"show", "library = 600.1.2", ""},
		{"rmmod", "", ""},
		{"show", "loaded = no", ""},
		{"allocate 0 /none 5", "0\n", ""}, // a machine without memacct charges nothing
		{"allocate 0 /none much", "", "is not a number"},
		{"free 1", "", ""},
		{"reuse-group /a /b", "", "No such file"},
		{"limits", "", ""},
		{"explode", "", `unknown command "explode"`},
	}
	for _, tt := range tests {
		var out strings.Builder
		err := run(append([]string{"-machine", m.Root}, strings.Fields(tt.command)...), &out)
		if !strings.Contains(out.String(), tt.out) {
			t.Errorf("%s: prints %q, want %q", tt.command, out.String(), tt.out)
		}
		if (err == nil) != (tt.err == "") || (err != nil && !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: %v, want %q", tt.command, err, tt.err)
		}
	}
	ids, err := m.Instances(0)
	if err != nil || len(ids) != 4 {
		t.Errorf("instances %v, %v; want four", ids, err)
	}
}

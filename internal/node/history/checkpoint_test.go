package history_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const agent = "k8s-gpu"

// disk is a state directory and a procfs root with a boot ID, and the log about them.
type disk struct {
	*testing.T
	dir, proc string
	log       bytes.Buffer
}

func newDisk(t *testing.T) *disk {
	d := &disk{T: t, dir: filepath.Join(t.TempDir(), "var/lib/tandem"), proc: t.TempDir()}
	d.boot("b00t\n")
	return d
}

// boot sets the boot ID; "" removes it.
func (d *disk) boot(id string) {
	d.Helper()
	path := filepath.Join(d.proc, "sys/kernel/random/boot_id")
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil && id == "" {
		err = os.Remove(path)
	} else if err == nil {
		err = os.WriteFile(path, []byte(id), 0o444)
	}
	check.NoError(d, err)
}

func (d *disk) open() *history.File {
	return history.Open(d.dir, agent, d.proc, slog.New(slog.NewTextHandler(&d.log, nil)))
}

// save writes a record, which must succeed.
func (d *disk) save(f *history.File, r core.Checkpoint) {
	d.Helper()
	check.NoError(d, f.Save(r))
}

// fails writes a record, which must fail with a reason.
func (d *disk) fails(f *history.File, r core.Checkpoint, why string) {
	d.Helper()
	if err := f.Save(r); err == nil || !strings.Contains(err.Error(), why) {
		d.Errorf("saved: %v, want an error with %q", err, why)
	}
}

func (d *disk) path() string { return filepath.Join(d.dir, agent+".json") }

func (d *disk) write(text []byte) {
	d.Helper()
	check.NoError(d, os.MkdirAll(d.dir, 0o755))
	check.NoError(d, os.WriteFile(d.path(), text, 0o600))
}

func (d *disk) read(name string) []byte {
	d.Helper()
	text, err := os.ReadFile(name)
	check.NoError(d, err)
	return text
}

// names are the files in the folder.
func (d *disk) names() (names []string) {
	d.Helper()
	entries, err := os.ReadDir(d.dir)
	check.NoError(d, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// logged is how many times the log has a text.
func (d *disk) logged(text string) int { return strings.Count(d.log.String(), text) }

// diff compares records without what a file does not hold.
func diff(want, got core.Checkpoint) string {
	return cmp.Diff(want, got, cmpopts.IgnoreUnexported(health.GPUHistory{}, health.FaultCount{}), cmpopts.EquateEmpty())
}

// fill sets every exported field beneath v to something that is not zero, so that a new one is seen here.
func fill(v reflect.Value) {
	n := uint64(1)
	var set func(reflect.Value)
	set = func(v reflect.Value) {
		n++
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(2026, 11, 20, 10, 31, int(n%60), 123_000_000, time.UTC)))
			return
		}
		switch v.Kind() {
		case reflect.Struct:
			for field, value := range v.Fields() {
				if field.IsExported() && field.Tag.Get("json") != "-" {
					set(value)
				}
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			set(v.Index(0))
			set(v.Index(1))
		case reflect.Map:
			v.Set(reflect.MakeMap(v.Type()))
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			set(key)
			set(value)
			v.SetMapIndex(key, value)
		case reflect.String:
			v.SetString("text " + string(rune('a'+n%26)))
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Int:
			v.SetInt(int64(n))
		case reflect.Uint8:
			v.SetUint(1) // of an enumeration
		case reflect.Uint32, reflect.Uint64:
			v.SetUint(n)
		default:
			panic("what is " + v.Type().String())
		}
	}
	set(v)
}

func full() (r core.Checkpoint) {
	fill(reflect.ValueOf(&r).Elem())
	for i := range r.Devices {
		r.Devices[i].ID = gpu.DeviceID([]string{"GPU-a", "GPU-b"}[i])
	}
	return r
}

// Later agents must read the format: a change of it may need another version.
func TestFormat(t *testing.T) {
	d, golden := newDisk(t), "testdata/v2.json"
	d.save(d.open(), full())
	goldenfile.Compare(t, golden, string(d.read(d.path())))
	next := newDisk(t)
	next.write(d.read(golden))
	r, _ := next.open().Load()
	if diff := diff(full(), r); diff != "" {
		t.Errorf("%s\n%s", diff, next.log.String())
	}
}

// The golden file has one value of each enumeration. These are all.
func TestEnumerations(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{values[health.State](t, 0, 4), "healthy degraded unknown unhealthy lost"},
		{values[health.Tristate](t, 0, 2), "not-reported no yes"},
		{values[health.RecoveryAction](t, 0, 9), "not-reported none reset reboot drain-p2p drain-and-reset recover-imex bus-reset system-reboot other"},
		{values[health.Fabric](t, 0, 5), "not-reported starting healthy limited unhealthy misconfigured"},
		{values[gpu.Toggle](t, 0, 2), "unknown disabled enabled"},
		{values[health.Reason](t, health.ReasonXID, health.ReasonWithdrawn), "XID EVENT RECOVERY_ACTION LOST PROBE_FAILED NOT_ANSWERING UNCHECKED NVML_UNAVAILABLE MAINTENANCE " +
			"ROW_REMAP_FAILED MEMORY_UNREPAIRABLE SRAM_THRESHOLD ROW_REMAP_PENDING PAGE_RETIREMENT_PENDING REPAIR_PENDING INFOROM_CORRUPT " +
			"ECC_UNCORRECTABLE OPERATIONAL_EVENT FABRIC_STARTING FABRIC_UNHEALTHY FABRIC_LIMITED NVLINK_DOWN SLOWDOWN_THERMAL SLOWDOWN_POWER PCIE_REPLAYS " +
			"PCIE_WIDTH WORKLOADS_FAILING NEEDS_SERVICE PROOF_FAILED FAULTS_UNKNOWN WITHDRAWN"},
	} {
		if c.got != c.want {
			t.Errorf("values are %s, want %s", c.got, c.want)
		}
	}
}

func values[T interface {
	~uint8
	MarshalText() ([]byte, error)
}](t *testing.T, first, last T) string {
	t.Helper()
	var all []string
	for v := first; v <= last; v++ {
		text, err := v.MarshalText()
		var back T
		reader, ok := any(&back).(interface{ UnmarshalText([]byte) error })
		if err != nil || !ok || reader.UnmarshalText(text) != nil || back != v {
			t.Errorf("%T %d is written as %q (%v) and read as %d", v, v, text, err, back)
		}
		all = append(all, string(text))
	}
	return strings.Join(all, " ")
}

func TestFileIsPrivateAndItsFolderIsCreated(t *testing.T) {
	d := newDisk(t)
	f := d.open()
	if r, boot := f.Load(); diff(core.Checkpoint{BootID: "b00t"}, r) != "" || boot != "b00t" || d.log.Len() > 0 {
		t.Errorf("before the first save: %+v, boot %q, log %s", r, boot, d.log.String())
	}
	d.save(f, full())
	check.NoError(t, os.Chmod(d.path(), 0o644))
	d.save(f, core.Checkpoint{BootID: "other"})
	file, err := os.Stat(d.path())
	if err != nil || file.Mode() != 0o600 {
		t.Errorf("mode %v, %v", file.Mode(), err)
	}
	if folder, err := os.Stat(d.dir); err != nil || folder.Mode().Perm() != 0o755 {
		t.Errorf("mode of the folder %v, %v", folder.Mode(), err)
	}
	if got := d.names(); len(got) != 1 {
		t.Errorf("left: %v", got)
	}
}

func TestEqualRecordIsNotWrittenAgain(t *testing.T) {
	d := newDisk(t)
	inode := func() os.FileInfo {
		file, err := os.Stat(d.path())
		check.NoError(t, err)
		return file
	}
	f := d.open()
	d.save(f, full())
	first := inode()
	d.save(f, full())
	next := d.open()
	next.Load()
	d.save(next, full())
	if !os.SameFile(first, inode()) {
		t.Error("written again")
	}
	check.NoError(t, os.Remove(d.path()))
	d.save(next, full())
	inode()
	if p := next.Problem(); p != "" || d.log.Len() > 0 {
		t.Errorf("problem %q, log %s", p, d.log.String())
	}
}

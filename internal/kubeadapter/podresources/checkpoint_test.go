package podresources

import (
	"encoding/base64"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// recorded is a checkpoint of a kubelet 1.37.1, shortened: an init container and the container after it have one GPU, another pod has a share on two
// NUMA nodes, with a limit of 20 GiB.
const recorded = `{"Data":{"PodDeviceEntries":[
{"PodUID":"u1","ContainerName":"init0","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-a"]},"AllocResp":"CgYKBGE9Yg=="},
{"PodUID":"u1","ContainerName":"app0","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-a"]},"AllocResp":"CgYKBGE9Yg=="},
{"PodUID":"u2","ContainerName":"app0","ResourceName":"nvidia.com/gpu.shared","DeviceIDs":{"0":["GPU-b::1"],"1":["GPU-b::1"],"-1":["GPU-c::0"]},"AllocResp":"KjEKL2s4cy5kZXZpY2UtcGx1Z2luLm52aWRpYS5jb20vbWVtb3J5LWxpbWl0PTIwNDgw"}
],"RegisteredDevices":{"nvidia.com/gpu":["GPU-a"]}},"Checksum":1736483922}`

// The file is read again only when the kubelet has replaced it, also one that is not understood. What is not in its format is an error, and not an empty one.
func TestCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), CheckpointName)
	r := checkpointReader{path: path}
	if _, err := r.read(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	write := func(text string) {
		t.Helper()
		check.NoError(t, errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)))
	}
	write(recorded)
	got, err := r.read()
	check.NoError(t, err)
	want := Checkpoint{Version: 1, Devices: []CheckpointDevice{
		{"u1", "init0", "nvidia.com/gpu", "GPU-a", 0, 0}, {"u1", "app0", "nvidia.com/gpu", "GPU-a", 0, 0},
		{"u2", "app0", "nvidia.com/gpu.shared", "GPU-c::0", -1, 20 << 30}, {"u2", "app0", "nvidia.com/gpu.shared", "GPU-b::1", 0, 20 << 30},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if again, err := r.read(); err != nil || again.Version != 1 {
		t.Errorf("read again: version %d, %v", again.Version, err)
	}
	write(`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}`)
	if empty, err := r.read(); err != nil || empty.Version != 2 || len(empty.Devices) > 0 {
		t.Errorf("without devices: %+v, %v", empty, err)
	}
	for _, text := range []string{
		"", "{}", "null", "[]", `{"Data":{}}`, `{"Data":{"RegisteredDevices":{}}}`, `{"Data":{"PodDeviceEntries":{}}}`,
		`{"Data":{"PodDeviceEntries":[{"PodUID":"u1"}]}}`, recorded[:200],
		`{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"a","ResourceName":"nvidia.com/gpu","DeviceIDs":["GPU-a"]}]}}`, // before 1.20
	} {
		write(text)
		c, err := r.read()
		if !errors.Is(err, ErrCheckpointFormat) {
			t.Errorf("%.60s: %+v, %v", text, c, err)
		}
		if _, again := r.read(); again != err { //nolint:errorlint // the same value, as nothing was read
			t.Errorf("%.60s: it is read again: %v", text, again)
		}
	}
	write(strings.Repeat(" ", maxCheckpoint+1))
	if _, err := r.read(); !statefile.IsContent(err) || strings.Count(err.Error(), path) != 1 {
		t.Errorf("a large file: %v", err)
	}
	write(recorded)
	if c, err := r.read(); err != nil || c.Version != 3 {
		t.Errorf("a file that can be read again: version %d, %v", c.Version, err)
	}
}

func FuzzParseCheckpoint(f *testing.F) {
	f.Add([]byte(recorded))
	f.Fuzz(func(t *testing.T, text []byte) {
		devices, err := parseCheckpoint(text)
		if err != nil && len(devices) > 0 {
			t.Errorf("%v with %v", err, devices)
		}
		for _, d := range devices {
			if d.PodUID == "" || d.Resource == "" {
				t.Errorf("%+v", d)
			}
		}
	})
}

// The names of CDI devices that the kubelet starts containers with are those in its stored responses, by field or annotation.
func TestStoredCDIDevices(t *testing.T) {
	const kind = "k8s.device-plugin.nvidia.com/memory-limit"
	entry := func(r *v1beta1.ContainerAllocateResponse) string {
		raw, err := proto.Marshal(r)
		check.NoError(t, err)
		return `{"PodUID":"u","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":null,"AllocResp":"` + base64.StdEncoding.EncodeToString(raw) + `"}`
	}
	named := func(names ...string) string {
		r := &v1beta1.ContainerAllocateResponse{}
		for _, name := range names {
			r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: name})
		}
		return entry(r)
	}
	path := filepath.Join(t.TempDir(), CheckpointName)
	write := func(entries string) {
		check.NoError(t, os.WriteFile(path, []byte(`{"Data":{"PodDeviceEntries":`+entries+`}}`), 0o600))
	}
	annotated := entry(&v1beta1.ContainerAllocateResponse{Annotations: map[string]string{"cdi.k8s.io/a": "k8s.device-plugin.nvidia.com/gpu=GPU-a," + kind + "=18432"}})
	write("[" + strings.Join([]string{named("k8s.device-plugin.nvidia.com/gpu=GPU-a", kind+"=20480"), named(), named(kind + "=20480"), annotated}, ",") + "]")
	if got, err := StoredCDIDevices(path, kind); err != nil || !slices.Equal(got, []string{"18432", "20480"}) {
		t.Errorf("%q, %v", got, err)
	}
	for text, want := range map[string]error{"null": nil, `[{"AllocResp":null}]`: nil, "7": ErrCheckpointFormat, `[{"AllocResp":"/////w=="}]`: ErrCheckpointFormat} {
		write(text)
		if got, err := StoredCDIDevices(path, kind); got != nil || !errors.Is(err, want) {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
}

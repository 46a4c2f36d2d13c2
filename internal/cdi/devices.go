package cdi

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/driverfiles"
	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// readDRM reads the DRM nodes of GPUs from sysfs, as NVIDIA's library does.
func (o Options) readDRM(devices []gpu.Device) map[gpu.PCIAddress]spec.DRM {
	found := map[gpu.PCIAddress]spec.DRM{}
	for i := range devices {
		pci := devices[i].PCI
		if _, known := found[pci]; known || pci == "" {
			continue
		}
		var drm spec.DRM
		entries, _ := os.ReadDir(filepath.Join(o.SysRoot, "bus/pci/devices", string(pci), "drm")) // sorted; none without DRM
		for _, e := range entries {
			if path := "/dev/dri/" + e.Name(); isCharDevice(spec.Join(o.ContainerDevRoot, path)) {
				drm.Nodes = append(drm.Nodes, path)
			}
		}
		for _, kind := range []string{"card", "render"} {
			link := fmt.Sprintf("/dev/dri/by-path/pci-%s-%s", pci, kind)
			target, err := os.Readlink(spec.Join(o.ContainerDevRoot, link))
			if err == nil && slices.Contains(drm.Nodes, filepath.Join("/dev/dri/by-path", target)) {
				drm.Links = append(drm.Links, target+"::"+link)
			}
		}
		found[pci] = drm
	}
	return found
}

func isCharDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// class is a specification beside that of the GPUs.
type class struct {
	name   string
	file   specfile.File
	logged bool // that the node has no such device
}

// other is what a class gives each container.
type other struct {
	name    string // qualified name of its device
	problem string // why it is not written, one line; "" = it is
}

// writeOthers writes the specifications beside that of the GPUs, or removes them if the node has no such devices.
func (w *Writer) writeOthers(ctx context.Context, s core.State, r driverfiles.Request) (written []other, failed bool) {
	for _, c := range w.others {
		made, device, err := w.specOf(c.name, s, r)
		switch {
		case err != nil:
		case made == nil:
			err = w.remove(ctx, &c.file)
			if !c.logged {
				w.opts.Log.Info("no CDI specification: the node has no such device", "class", c.name)
			}
		default:
			var text []byte
			if text, err = specfile.Marshal(made); err == nil {
				err = w.sync(ctx, &c.file, text, s.Incarnation)
			}
		}
		c.logged = made == nil
		o := other{name: w.opts.Vendor + "/" + c.name + "=" + device}
		if err != nil {
			o.problem, failed = c.name+": "+oneLine(err), true
		}
		if made != nil || err != nil {
			written = append(written, o)
		}
	}
	return written, failed
}

// specOf returns the specification of a class, and the name of its device; nil if the node has no such device.
func (w *Writer) specOf(name string, s core.State, r driverfiles.Request) (*specs.Spec, string, error) {
	if name != classIMEX {
		made, err := driverfiles.ReadDevice(r, w.opts.Vendor, name, w.opts.DevRoot)
		return made, spec.AllDevices, err
	}
	var devices []specs.Device
	for _, channel := range w.opts.IMEXChannels {
		path := filepath.Join(filepath.Dir(gpu.IMEXChannelNode), "channel"+strconv.Itoa(channel))
		if _, present := slices.BinarySearch(s.Snapshot.Nodes, path); !present {
			continue
		}
		devices = append(devices, specs.Device{Name: strconv.Itoa(channel), ContainerEdits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{spec.Node(w.opts.DevRoot, path)},
		}})
	}
	if len(devices) == 0 {
		return nil, "", nil
	}
	return spec.New(w.opts.Vendor+"/"+name, devices, specs.ContainerEdits{}), devices[0].Name, nil
}

// files are the files that this agent can write, of every class.
func (o Options) files() (paths []string) {
	for _, name := range []string{classGPU, classIMEX, driverfiles.GDRCopy, driverfiles.GDS, driverfiles.MOFED, classLimit} {
		paths = append(paths, specfile.Path(o.Folder, o.Vendor+"/"+name))
	}
	return paths
}

package deviceplugin

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"path"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/node/mps"
)

// DeviceLists are the forms in which the response of Allocate lists the devices of a container: the strategies of NVIDIA's
// k8s-device-plugin (device-list-strategy). Those of CDI have an effect only if the plan has CDI names.
type DeviceLists struct {
	EnvVar           bool   // "envvar": NVIDIA_VISIBLE_DEVICES; also without VolumeMounts
	VolumeMounts     bool   // "volume-mounts": mounts of /dev/null, which NVIDIA's container runtime takes for a list
	CDIAnnotations   bool   // "cdi-annotations"
	AnnotationPrefix string // of the keys; "" = "cdi.k8s.io/"
	CDINames         bool   // "cdi-cri": the field cdi_devices

	GDS, MOFED, GDRCopy bool // variables for NVIDIA's container runtime
}

const (
	// volumeMountRoot is the folder of mounts that NVIDIA's container runtime takes for a list of devices
	// (nvidia-container-toolkit, internal/config/image).
	volumeMountRoot = "/var/run/nvidia-container-devices"

	// annotationName is the name of the annotations, before a hash. With one of 32 digits it has 53 of the 63 characters that CDI allows.
	annotationName   = "nvidia-device-plugin_"
	annotationPrefix = "cdi.k8s.io/"
	imexChannel      = "0"
)

// allocateResponse returns the Allocate response of a plan for a resource: what NVIDIA's k8s-device-plugin 0.20.0 responds, with
// each name, mount and node once and in the plan's order. The kubelet stores it with the pod and uses it again after restarts and
// reboots, so it contains only what remains valid. It is a function of its arguments.
func allocateResponse(resource string, p inventory.Plan, o Options) *v1beta1.ContainerAllocateResponse {
	r := &v1beta1.ContainerAllocateResponse{Envs: make(map[string]string, len(p.Env)+1)}
	if len(p.IDs) == 0 {
		return r
	}
	if p.Injection.Runtime {
		addRuntimeList(r, p, o.Lists)
	}
	if len(p.CDI) > 0 {
		addCDINames(r, resource, p.CDI, o.Lists)
	}
	for _, e := range p.Env {
		r.Envs[e.Name] = e.Value
	}
	o.Lists.addFeatures(r.Envs)
	for _, n := range p.Nodes {
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{
			HostPath: path.Join("/", o.DevRoot, n.Path), ContainerPath: n.Path, Permissions: n.Permissions,
		})
	}
	if p.MPS != "" {
		addMPSClient(r, p.MPS, o.MPSRoot)
	}
	return r
}

// Response returns what Allocate responds to a request for the units of a plan, which are those of one resource. The plan was made
// by inventory.Reserve. Of the options it needs DevRoot, MPSRoot and Lists.
func Response(p inventory.Plan, o Options) *v1beta1.ContainerAllocateResponse {
	resource := ""
	if len(p.Units) > 0 {
		resource = kubeadapter.ResourceOf(p.Units[0])
	}
	return allocateResponse(resource, p, o)
}

// addFeatures adds the variables of GPUDirect Storage, MOFED and GDRCopy.
func (l DeviceLists) addFeatures(env map[string]string) {
	if l.GDS {
		env["NVIDIA_GDS"] = "enabled"
	}
	if l.MOFED {
		env["NVIDIA_MOFED"] = "enabled"
	}
	if l.GDRCopy {
		env["NVIDIA_GDRCOPY"] = "enabled"
	}
}

// addRuntimeList adds the devices for NVIDIA's container runtime. With mounts the variable refers to them.
func addRuntimeList(r *v1beta1.ContainerAllocateResponse, p inventory.Plan, l DeviceLists) {
	if l.EnvVar || !l.VolumeMounts {
		r.Envs[inventory.VisibleDevices] = p.VisibleDevices()
		if p.IMEX {
			r.Envs["NVIDIA_IMEX_CHANNELS"] = imexChannel
		}
	}
	if !l.VolumeMounts {
		return
	}
	r.Envs[inventory.VisibleDevices] = volumeMountRoot
	for _, id := range p.IDs {
		r.Mounts = append(r.Mounts, &v1beta1.Mount{HostPath: "/dev/null", ContainerPath: volumeMountRoot + "/" + id})
	}
	if p.IMEX {
		r.Mounts = append(r.Mounts, &v1beta1.Mount{HostPath: "/dev/null", ContainerPath: volumeMountRoot + "/imex/" + imexChannel})
	}
}

// addCDINames adds the names of CDI devices.
func addCDINames(r *v1beta1.ContainerAllocateResponse, resource string, names []string, l DeviceLists) {
	if l.CDIAnnotations {
		list := strings.Join(names, ",")
		r.Annotations = map[string]string{cmp.Or(l.AnnotationPrefix, annotationPrefix) + annotationName + listHash(resource, list): list}
	}
	if l.CDINames {
		devices := make([]v1beta1.CDIDevice, len(names))
		r.CdiDevices = make([]*v1beta1.CDIDevice, len(names))
		for i, name := range names {
			devices[i].Name, r.CdiDevices[i] = name, &devices[i]
		}
	}
}

// listHash makes the annotations of a container differ by resource: the kubelet merges the responses of all resources, and keeps one
// value for each key. Equal requests have equal keys, unlike with NVIDIA's plugin, whose keys are random.
func listHash(resource, list string) string {
	sum := sha256.Sum256([]byte(resource + "\n" + list))
	return hex.EncodeToString(sum[:16])
}

// addMPSClient makes a container a client of a pool's MPS control daemon, with the variable and the mounts of NVIDIA's
// k8s-device-plugin (mps/root.go). All daemons use one /dev/shm.
func addMPSClient(r *v1beta1.ContainerAllocateResponse, pool, root string) {
	pipe := mps.Pipe("/mps", pool)
	r.Envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
	r.Mounts = append(r.Mounts,
		&v1beta1.Mount{HostPath: mps.Pipe(root, pool), ContainerPath: pipe},
		&v1beta1.Mount{HostPath: path.Join(root, "shm"), ContainerPath: "/dev/shm"},
	)
}

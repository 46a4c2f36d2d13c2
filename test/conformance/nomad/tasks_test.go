package nomad

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/client/allocdir"
	"github.com/hashicorp/nomad/client/allocrunner/taskrunner"
	clientconfig "github.com/hashicorp/nomad/client/config"
	"github.com/hashicorp/nomad/client/lib/cgroupslib"
	"github.com/hashicorp/nomad/client/lib/proclib"
	"github.com/hashicorp/nomad/client/pluginmanager/drivermanager"
	services "github.com/hashicorp/nomad/client/serviceregistration/mock"
	"github.com/hashicorp/nomad/client/serviceregistration/wrapper"
	clientstate "github.com/hashicorp/nomad/client/state"
	clientstructs "github.com/hashicorp/nomad/client/structs"
	"github.com/hashicorp/nomad/client/taskenv"
	"github.com/hashicorp/nomad/client/widmgr"
	mockdriver "github.com/hashicorp/nomad/drivers/mock"
	"github.com/hashicorp/nomad/nomad/mock"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/drivers"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"
)

// driverOf is a driver manager with one driver for every task.
type driverOf struct {
	drivermanager.Manager
	driver drivers.DriverPlugin
}

func (d driverOf) Dispense(string) (drivers.DriverPlugin, error) { return d.driver, nil }

func (driverOf) RegisterEventHandler(string, string, drivermanager.EventHandler) {}

func (driverOf) DeregisterEventHandler(string, string) {}

// recorder is Nomad's mock driver, with a record of the tasks that it gets.
type recorder struct {
	drivers.DriverPlugin
	schema  *hclspec.Spec // of a task's configuration; nil = that of the mock driver
	started chan *drivers.TaskConfig
}

func newRecorder(t *testing.T) *recorder {
	return &recorder{mockdriver.NewMockDriver(t.Context(), hclog.NewNullLogger()), nil, make(chan *drivers.TaskConfig, 16)}
}

func (r *recorder) Capabilities() (*drivers.Capabilities, error) {
	c, err := r.DriverPlugin.Capabilities()
	if err == nil {
		c.MountConfigs = drivers.MountConfigSupportAll
	}
	return c, err
}

func (r *recorder) TaskConfigSchema() (*hclspec.Spec, error) {
	if r.schema != nil {
		return r.schema, nil
	}
	return r.DriverPlugin.TaskConfigSchema()
}

func (r *recorder) StartTask(c *drivers.TaskConfig) (*drivers.TaskHandle, *drivers.DriverNetwork, error) {
	r.started <- c.Copy()
	if r.schema != nil { // the mock driver does not know these keys
		c = c.Copy()
		if err := c.EncodeConcreteDriverConfig(&mockdriver.TaskConfig{Command: mockdriver.Command{RunFor: "10m"}}); err != nil {
			return nil, nil, err
		}
	}
	return r.DriverPlugin.StartTask(c)
}

// next returns what the driver got with the next start of a task.
func (r *recorder) next(t *testing.T) *drivers.TaskConfig {
	t.Helper()
	select {
	case c := <-r.started:
		return c
	case <-time.After(timeout):
		t.Fatal("no task was started")
		return nil
	}
}

// task is a task in Nomad's task runner, as a client runs it.
type task struct {
	*taskrunner.TaskRunner
	config *taskrunner.Config
}

// taskUpdates ignores updates of a task's state.
type taskUpdates struct{}

func (taskUpdates) TaskStateUpdated() {}

// newTask returns a task with reserved devices, which is not started yet. edit may change job and client.
func (a *agent) newTask(t *testing.T, driver drivers.DriverPlugin, devices []*structs.AllocatedDeviceResource, edit func(*structs.TaskGroup, *clientconfig.Config)) *task {
	t.Helper()
	client, cleanup := clientconfig.TestClientConfig(t)
	t.Cleanup(cleanup)
	log := hclog.NewInterceptLogger(&hclog.LoggerOptions{Level: hclog.Trace, Output: a.logs})
	client.Logger = log
	alloc := mock.BatchAlloc()
	group := alloc.Job.TaskGroups[0]
	spec := group.Tasks[0]
	spec.Driver, spec.Config = "mock_driver", map[string]any{"run_for": "10m"}
	spec.LogConfig.Disabled, spec.KillTimeout = true, 10*time.Millisecond
	spec.RestartPolicy = &structs.RestartPolicy{Attempts: 5, Interval: time.Hour, Mode: structs.RestartPolicyModeFail}
	alloc.AllocatedResources.Tasks[spec.Name].Devices = devices
	if edit != nil {
		edit(group, client)
	}
	dir := allocdir.NewAllocDir(log, client.AllocDir, client.AllocMountsDir, alloc.ID)
	must(t, dir.Build())
	files := dir.NewTaskDir(spec)
	t.Cleanup(func() {
		_ = syscall.Unmount(files.SecretsDir, syscall.MNT_DETACH) // in use by a task runner that ended with its agent: it leaves a socket open
		if err := dir.Destroy(); err != nil {
			t.Error(err)
		}
	})
	if os.Getuid() == 0 {
		cgroup := cgroupslib.Factory(alloc.ID, spec.Name, false)
		if err := cgroup.Setup(); err != nil {
			t.Logf("cgroup: %v", err)
		}
		t.Cleanup(func() { _, _ = cgroup.Kill(), cgroup.Teardown() })
	}
	registry := services.NewServiceRegistrationHandler(log)
	ready := make(chan struct{})
	close(ready)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	db := clientstate.NewMemDB(log)
	k := &task{config: &taskrunner.Config{
		Alloc: alloc, ClientConfig: client, Task: spec, TaskDir: files, Logger: log,
		ConsulServices: registry, StateDB: db, StateUpdater: taskUpdates{},
		DeviceManager: a.dm, DriverManager: driverOf{driver: driver},
		ServersContactedCh: make(chan struct{}), StartConditionMetCh: ready,
		ShutdownDelayCtx: ctx, ShutdownDelayCancelFn: cancel,
		ServiceRegWrapper:  wrapper.NewHandlerWrapper(log, registry, services.NewServiceRegistrationHandler(log)),
		Wranglers:          proclib.MockWranglers(t),
		AllocHookResources: clientstructs.NewAllocHookResources(),
		WIDMgr: widmgr.NewWIDMgr(widmgr.NewMockWIDSigner(spec.Identities), alloc, db, log,
			taskenv.NewBuilder(mock.Node(), alloc, nil, "global").Build()),
	}}
	must(t, k.config.WIDMgr.Run())
	return k
}

// run starts a task runner for the task. A task that ran before is restored from the client's state, as after the start of
// another Nomad agent.
func (k *task) run(t *testing.T) {
	t.Helper()
	restored := k.TaskRunner != nil
	var err error
	if k.TaskRunner, err = taskrunner.NewTaskRunner(k.config); err != nil {
		t.Fatal(err)
	}
	if restored {
		must(t, k.Restore())
	}
	go k.Run()
	r := k.TaskRunner
	t.Cleanup(func() {
		if t.Failed() {
			for _, e := range r.TaskState().Events {
				t.Logf("task: %s %s", e.Type, e.DisplayMessage)
			}
		}
		_ = r.Kill(context.Background(), structs.NewTaskEvent("end"))
	})
}

// restartAgent ends the task runner without the task, and starts another one.
func (k *task) restartAgent(t *testing.T) {
	k.Shutdown()
	<-k.WaitCh()
	k.run(t)
}

// restart restarts the task.
func (k *task) restart(t *testing.T) {
	t.Helper()
	await(t, "the task runs", func() bool { return k.TaskState().State == structs.TaskStateRunning })
	must(t, k.Restart(t.Context(), structs.NewTaskEvent(structs.TaskRestartSignal), false))
}

// script writes the devices of a task, which of its nodes it can open, and which of the FILES are missing or empty. The simulated nodes have no driver in this kernel: one
// that may be opened is "No such device or address".
const script = `
exec >$NOMAD_ALLOC_DIR/data/report
attempt() {
  case $( (: <>$1) 2>&1) in
  *"No such device or address"*) echo open $1 ;;
  *"Operation not permitted"*) echo not permitted: $1 ;;
  esac
}
echo $CUDA_VISIBLE_DEVICES
IFS=:
for node in $TANDEM_GPU_NODES; do
  if [ -e $node ]; then attempt $node; else echo missing $node; fi
done
for file in $FILES; do [ -s $file ] || echo missing $file; done
`

// foreign is the end of a script that tries a node of another GPU, which it makes itself in the folder of its task.
const foreign = "mknod -m 666 $NOMAD_TASK_DIR/foreign c 195 7 && attempt $NOMAD_TASK_DIR/foreign" + end

const end = "\necho end\nsleep 600\n"

// output waits for the report of a script, and removes it.
func (k *task) output(t *testing.T) (text string) {
	t.Helper()
	path := filepath.Join(k.config.TaskDir.SharedAllocDir, "data", "report")
	await(t, path, func() bool {
		content, err := os.ReadFile(path)
		text = string(content)
		return err == nil && strings.HasSuffix(text, "end\n")
	})
	must(t, os.Remove(path))
	return text
}

// driver returns one of Nomad's drivers, as a client loads it.
func driver(t *testing.T, name string) drivers.DriverPlugin {
	t.Helper()
	if os.Getuid() == 0 {
		prepareCgroups(t)
	}
	d, err := drivermanager.TestDriverManager(t).Dispense(name)
	must(t, err)
	return d
}

// prepareCgroups makes Nomad's cgroups as the start of a client does, with all CPUs.
func prepareCgroups(t *testing.T) {
	t.Helper()
	const v1 = "/sys/fs/cgroup/cpuset"
	cpus, err := os.ReadFile(v1 + "/cpuset.cpus")
	isV1 := cgroupslib.GetMode() == cgroupslib.CG1
	if !isV1 {
		cpus, err = os.ReadFile("/sys/fs/cgroup/cpuset.cpus.effective")
	}
	if err == nil {
		err = cgroupslib.Init(hclog.NewNullLogger(), strings.TrimSpace(string(cpus)))
	}
	if err == nil && isV1 { // in a client, a hook of the allocation does this
		err = os.WriteFile(filepath.Join(v1, cgroupslib.NomadCgroupParent, "share/cpuset.cpus"), cpus, 0o644)
	}
	must(t, err)
}

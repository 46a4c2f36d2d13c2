//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// privilegesOf returns what the kernel allows a process of a container, as rows of a table.
func privilegesOf(t *testing.T, pid int) [][2]string {
	t.Helper()
	proc := func(name string) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	status := map[string]string{}
	for line := range strings.Lines(proc("status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.TrimSpace(value)
	}
	writes, reads, root := hostMounts(proc("mountinfo"))
	rows := [][2]string{
		{"user", strings.Fields(status["Uid"])[1]},
		{"capabilities", capabilities(t, status["CapEff"], status["CapBnd"])},
		{"can gain privileges (`no_new_privs` unset)", yes(status["NoNewPrivs"] == "0")},
		{"seccomp", map[string]string{"0": "unconfined", "2": "the runtime's profile"}[status["Seccomp"]]},
		{"root file system", root},
		{"namespaces of the host", hostNamespaces(t, pid)},
		{"folders of the host, writable", strings.Join(writes, ", ")},
		{"folders of the host, read-only", strings.Join(reads, ", ")},
		{"token of a service account", yes(strings.Contains(proc("mountinfo"), "serviceaccount"))},
	}
	if devices := deviceRules(proc("cgroup")); devices != "" {
		rows = append(rows, [2]string{"devices (control group)", devices})
	}
	return rows
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

// capabilities wants SYSLOG alone to be in force, and no other to be had by running another program.
func capabilities(t *testing.T, sets ...string) string {
	t.Helper()
	for _, set := range sets {
		if n, err := strconv.ParseUint(set, 16, 64); err != nil || n != 1<<unix.CAP_SYSLOG {
			return strings.Join(sets, " ")
		}
	}
	return "`SYSLOG`"
}

// hostMounts returns the mounts that are not those of every container, and how / is mounted.
func hostMounts(mountinfo string) (writes, reads []string, root string) {
	for line := range strings.Lines(mountinfo) {
		f := strings.Fields(line)
		point, options := f[4], strings.Split(f[5], ",")
		readOnly := slices.Contains(options, "ro")
		switch {
		case point == "/":
			root = map[bool]string{true: "read-only", false: "writable"}[readOnly]
		case point == "/dev" || point == "/proc" || point == "/sys" || point == "/etc/hosts" || point == "/etc/hostname" || point == "/etc/resolv.conf",
			strings.HasPrefix(point, "/dev/"), strings.HasPrefix(point, "/proc/"), strings.HasPrefix(point, "/sys/"):
		case readOnly && strings.HasPrefix(point, "/driver-root/dev/"),
			slices.ContainsFunc([]string{"/driver-root/usr/", "/var/lib/tandem/"}, func(p string) bool { return strings.HasPrefix(point, p) }):
			// what is mounted on the host beneath
		case strings.Contains(point, "kubernetes.io/serviceaccount"): // see the row of the token
		case readOnly:
			reads = append(reads, "`"+point+"`")
		default:
			writes = append(writes, "`"+point+"`")
		}
	}
	slices.Sort(writes)
	slices.Sort(reads)
	return slices.Compact(writes), slices.Compact(reads), root
}

// hostNamespaces returns the namespaces that the process shares with the node's programs, of which the test is one. The time and user
// namespaces of all containers are the node's.
func hostNamespaces(t *testing.T, pid int) string {
	t.Helper()
	var shared []string
	for _, kind := range []string{"ipc", "mnt", "net", "pid", "uts"} {
		own, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind)); err != nil || its == own {
			shared = append(shared, kind)
		}
	}
	if len(shared) == 0 {
		return "none"
	}
	return strings.Join(shared, ", ")
}

// ordinary are the devices of every container of containerd.
var ordinary = map[string]string{
	"c 1:3 rwm": "null", "c 1:5 rwm": "zero", "c 1:7 rwm": "full", "c 1:8 rwm": "random", "c 1:9 rwm": "urandom",
	"c 5:0 rwm": "tty", "c 5:2 rwm": "ptmx", "c 136:* rwm": "pts", "c 10:200 rwm": "net/tun",
}

// deviceRules returns what the device controller allows, "" where that can't be read (version 2 of control groups).
func deviceRules(cgroup string) string {
	for line := range strings.Lines(cgroup) {
		if _, path, found := strings.Cut(strings.TrimSpace(line), ":devices:"); found {
			list, err := os.ReadFile("/sys/fs/cgroup/devices" + path + "/devices.list")
			if err != nil {
				return ""
			}
			var names []string
			for rule := range strings.Lines(string(list)) {
				rule = strings.TrimSpace(rule)
				if name, known := ordinary[rule]; known {
					names = append(names, name)
				} else if !strings.HasSuffix(rule, ":* m") { // any node may be made, with the capability MKNOD, and not opened
					names = append(names, rule)
				}
			}
			slices.Sort(names)
			return "`" + strings.Join(names, "`, `") + "`"
		}
	}
	return ""
}

package report

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Debug is the inside of a running agent, for the one who has to find out why it does what it does. Its JSON is no
// promise: keys may change with the agent.
type Debug struct {
	PID         int      `json:"pid"`
	Goroutines  int      `json:"goroutines"`
	Threads     int      `json:"threads"` // a driver call that hangs holds one
	Descriptors int      `json:"descriptors"`
	DriverFiles []string `json:"driverFiles"` // NVIDIA's device nodes that the process has open
	HeapBytes   uint64   `json:"heapBytes"`

	Tasks     []Task     `json:"parts"`     // the agent's loops
	Calls     []Call     `json:"calls"`     // driver calls in progress, the event wait excepted
	Endpoints []Endpoint `json:"endpoints"` // sockets for the kubelet; none under Nomad
	Checks    uint64     `json:"checks"`    // rounds of checks since the start
	LastCheck time.Time  `json:"lastCheck,omitzero"`
	Stacks    string     `json:"stacks"` // of all goroutines, equal ones once
}

// Task is one loop of the agent.
type Task struct {
	Name  string    `json:"name"`
	Last  time.Time `json:"last"` // when it came round last
	Turns uint64    `json:"turns"`
	Late  bool      `json:"late"` // it should have come round again by now
}

// Call is a driver call in progress.
type Call struct {
	Name  string    `json:"name"`
	Index int       `json:"index"` // NVML index of the GPU that it is about; -1 = none
	Since time.Time `json:"since"`
}

// Endpoint is one resource's socket for the kubelet.
type Endpoint struct {
	Resource      string    `json:"resource"`
	Status        string    `json:"standing"` // "watched", or why it is not
	Since         time.Time `json:"since"`
	Socket        string    `json:"socket,omitempty"`
	Registrations uint64    `json:"registrations"`
	Lists         uint64    `json:"lists"` // sent
	LastError     string    `json:"lastError,omitempty"`
	LastErrorAt   time.Time `json:"lastErrorAt,omitzero"`
}

// Write writes it for people; the stacks come last.
func (d Debug) Write(w io.Writer) error {
	fmt.Fprintf(w, "pid %d, %d goroutines, %d threads, %d descriptors, heap %d KiB\n",
		d.PID, d.Goroutines, d.Threads, d.Descriptors, d.HeapBytes>>10)
	files := "none"
	if len(d.DriverFiles) > 0 {
		files = strings.Join(d.DriverFiles, " ")
	}
	fmt.Fprintf(w, "driver's files open: %s\n", files)
	fmt.Fprintf(w, "checks: %d, last %s\n", d.Checks, moment(d.LastCheck))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nPART\tCAME ROUND\tTIMES\t")
	for _, p := range d.Tasks {
		late := ""
		if p.Late {
			late = "LATE"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\n", p.Name, moment(p.Last), p.Turns, late)
	}
	if len(d.Endpoints) > 0 {
		fmt.Fprintln(t, "\nRESOURCE\tSTANDING\tSINCE\tREGISTERED\tLISTS\tLAST ERROR")
	}
	for _, e := range d.Endpoints {
		trouble := "none"
		if e.LastError != "" {
			trouble = moment(e.LastErrorAt) + " " + e.LastError
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\n", e.Resource, e.Status, moment(e.Since), e.Registrations, e.Lists, trouble)
	}
	if len(d.Calls) > 0 {
		fmt.Fprintln(t, "\nDRIVER CALL\tGPU\tSINCE")
	}
	for _, c := range d.Calls {
		fmt.Fprintf(t, "%s\t%d\t%s\n", c.Name, c.Index, moment(c.Since))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s", d.Stacks)
	return err
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

// Stacks are those of all goroutines. Equal ones are there once, with their number.
func Stacks() string {
	profile := make([]runtime.StackRecord, runtime.NumGoroutine()+64)
	n, ok := runtime.GoroutineProfile(profile)
	if !ok {
		return "too many goroutines at once\n"
	}
	counts := map[string]int{}
	for _, r := range profile[:n] {
		counts[stack(r.Stack())]++
	}
	each := make([]string, 0, len(counts))
	for s, n := range counts {
		each = append(each, fmt.Sprintf("goroutines: %d\n%s\n", n, s))
	}
	slices.Sort(each)
	return strings.Join(each, "")
}

func stack(pcs []uintptr) string {
	var b strings.Builder
	for frames := runtime.CallersFrames(pcs); ; {
		f, more := frames.Next()
		fmt.Fprintf(&b, "    %s %s:%d\n", f.Function, f.File, f.Line)
		if !more {
			return b.String()
		}
	}
}

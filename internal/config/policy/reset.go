package policy

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// maxAttempts limits the resets for one fault: what two resets do not repair, a third does not.
const maxAttempts = 2

var (
	modes   = []string{reset.Off.String(), reset.Report.String(), reset.Act.String()}
	layouts = []string{"keep", "lost"}
)

var resetKeys = []schema.Key{
	{Name: "mode", Default: "off", Type: schema.OneOf(modes...),
		Usage: "`act`: a faulty GPU that a reset can repair is reset while no work has it; `report`: the agent shows what it would do. `off` does not limit the command `reset` of a person"},
	{Name: "attempts", Default: "2", Type: schema.Int(1, maxAttempts), Usage: "resets for one fault; a GPU that is faulty after them is left to a person, or to another system"},
	{Name: "migLayout", Default: "keep", Type: schema.OneOf(layouts...),
		Usage: "`keep`: a GPU with MIG instances is not reset, because a reset removes them; `lost`: it is, and another program makes its layout again"},
	{Name: "program", Type: schema.Match(`^/`, "an absolute path"),
		Usage: "path of `nvidia-smi`, which `nomad-gpu` runs as root; without the key, where the driver has it. On Kubernetes a component of its own runs it, and the key has no effect"},
	{Name: "pause", Type: schema.ObjectOf(pauseKeys...),
		Usage: "programs that watch GPUs, which `nomad-gpu` stops for a reset when they have the GPU open. " +
			"On Kubernetes the key has no effect"},
}

// programName is the name of a program as the kernel shows it.
var programName = regexp.MustCompile(`^[^/ ]{1,64}$`)

var pauseKeys = []schema.Key{
	{Name: "programs", Required: true, Type: schema.ListOf(schema.Match(programName.String(), "the name of a program"), 1),
		Usage: "their names, such as `nv-hostengine` and `dcgm-exporter`"},
	{Name: "command", Required: true, Type: schema.ListOf(schema.Match(`.`, "text"), 1),
		Usage: "command that stops them: absolute path of a program, which only root can write, and its arguments; " +
			"no shell runs it. Exit status 0: they are stopped"},
	{Name: "resume", Required: true, Type: schema.ListOf(schema.Match(`.`, "text"), 1),
		Usage: "command that starts them again, whatever became of the reset, also after a restart of the agent: " +
			"each minute until it ends with 0"},
}

// readPause reads the key "pause"; the zero value if there is none, or it is not for this agent.
func (c *compiler) readPause(v value) (p reset.Pause) {
	if !v.Given() {
		return p
	}
	f := fieldsOf(v, pauseKeys)
	command := func(key string) []string {
		all := readTexts(f.At(key))
		if len(all) == 0 || !filepath.IsAbs(all[0]) {
			f.At(key).Failf("want the absolute path of a program and its arguments, " +
				"such as [/usr/bin/systemctl, stop, nvidia-dcgm]")
		}
		return all
	}
	p = reset.Pause{Programs: readTexts(f.At("programs")), Stop: command("command"), Resume: command("resume")}
	isOther := func(name string) bool { return !programName.MatchString(name) }
	if len(p.Programs) == 0 || slices.ContainsFunc(p.Programs, isOther) {
		f.At("programs").Failf("want names of programs without a folder, such as [nv-hostengine]")
	}
	if c.to == Kubernetes {
		const note = " has no effect: on Kubernetes have the monitoring pod leave the node, see docs/reset.md"
		c.notes = append(c.notes, v.Where()+note)
		return reset.Pause{}
	}
	return p
}

// readReset reads the section "reset"; the zero Policy if there is none. The program is "" unless the file has one for this agent.
func (c *compiler) readReset(v value) (p reset.Policy, program string, pause reset.Pause) {
	if !v.Given() {
		return p, "", pause
	}
	f := fieldsOf(v, resetKeys)
	p = reset.Default()
	if mode := f.At("mode"); mode.Given() {
		text, _ := mode.OneOf(modes...)
		_ = p.Mode.UnmarshalText([]byte(text)) // OneOf has the problem
	}
	if attempts := f.At("attempts"); attempts.Given() {
		p.Attempts = attempts.Int(1, maxAttempts, "1 or 2")
		if !f.At("mode").Given() {
			attempts.Failf("has no effect: reset.mode is off")
		}
	}
	if layout := f.At("migLayout"); layout.Given() {
		text, _ := layout.OneOf(layouts...)
		p.LoseMIG = text == "lost"
	}
	return p, c.readResetProgram(f.At("program")), c.readPause(f.At("pause"))
}

func (c *compiler) readResetProgram(v value) string {
	text, ok := v.Scalar()
	switch {
	case !v.Given() || !ok:
	case !filepath.IsAbs(text):
		v.Failf("want an absolute path such as /usr/bin/nvidia-smi")
	case c.to == Kubernetes:
		c.notes = append(c.notes, v.Where()+" has no effect: on Kubernetes a component of its own runs nvidia-smi")
	default:
		return text
	}
	return ""
}

// ResetSummary is what the section means, in one line; "" if no GPU is reset but by a person.
func (r Result) ResetSummary() string {
	p := r.Reset
	if !p.On() {
		return ""
	}
	does := "a faulty GPU that a reset can repair is reset while no work has it"
	if p.Mode == reset.Report {
		does = "no GPU is reset; it is shown which one would be"
	}
	times := "once"
	if p.Attempts > 1 {
		times = fmt.Sprintf("%d times", p.Attempts)
	}
	mig := "GPUs with MIG instances are not"
	if p.LoseMIG {
		mig = "also with MIG instances, which it loses"
	}
	return fmt.Sprintf("reset: %s, at most %s for one fault; %s", does, times, mig)
}

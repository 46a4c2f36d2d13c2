package policy

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

var proveKeys = []schema.Key{
	{Name: "command", Required: true, Type: schema.ListOf(schema.Match(`.`, "text"), 1),
		Usage: "absolute path of the program, and its arguments; no shell runs it. Exit status 0: the GPU passed; 1: it failed; any other, a signal or a timeout: the check could not run, which is no result"},
	{Name: "timeout", Default: "60s", Type: lasts("a time from 1s to 15m"), Usage: "time after which the command is ended"},
	{Name: "at", Type: schema.ListOf(schema.OneOf(reasonNames()...), 1),
		Usage: "why a GPU is proved: after a boot, a reset or its recovery from a fault, or when it is idle; without the key, for all of these"},
	{Name: "every", Default: "168h", Type: lasts("a time from 1h to 8784h"), Usage: "for `idle`: age of its last result at which a free GPU is proved again; nodes are spread over the eighth before it"},
	{Name: "idleFor", Default: "10m", Type: lasts("a time from 30s to 168h"), Usage: "for `idle`, and for `boot` with unproved GPUs that take work: how long no work has had the GPU"},
	{Name: "maxPerNode", Default: "1", Type: schema.Int(1, 64), Usage: "GPUs of a node that are proved at a time"},
	{Name: "windows", Type: schema.ListOf(schema.ObjectOf(windowKeys...), 0), Usage: "for `idle`: times of the day in which a proof may begin; without the key, any time"},
	{Name: "onFail", Default: "unhealthy", Type: schema.OneOf("unhealthy", "degraded"), Usage: "health of a GPU that failed, until it passes or an operator clears it"},
	{Name: "unproved", Default: "offer", Type: schema.OneOf("offer", "withhold"),
		Usage: "`withhold`: after a boot a GPU takes no work until it has passed. After a reset and a recovery, if `at` has them, that is always so. A check that could not run withholds no GPU"},
}

var windowKeys = []schema.Key{
	{Name: "days", Type: schema.ListOf(schema.OneOf(dayNames...), 1), Usage: "days on which it begins; without the key, each day"},
	{Name: "from", Required: true, Type: clockType, Usage: "its beginning, in the time zone of the agent's process"},
	{Name: "to", Required: true, Type: clockType, Usage: "its end; one that is not after the beginning is on the next day"},
}

var (
	dayNames  = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"} // as time.Weekday
	clockType = schema.Match(`^([01][0-9]|2[0-3]):[0-5][0-9]$`, "a time of the day such as `22:00`")
	clock     = regexp.MustCompile(clockType.Pattern)
)

// lasts is the type of a time that time.ParseDuration reads.
func lasts(words string) schema.Type {
	return schema.Match(`^\+?([0-9.]+(ns|us|µs|μs|ms|s|m|h))+$`, words)
}

func reasonNames() (names []string) {
	for _, r := range proof.Reasons() {
		names = append(names, r.String())
	}
	return names
}

// readProve reads the section "prove"; the zero Policy if there is none.
func (c *compiler) readProve(v value) proof.Policy {
	if !v.Given() {
		return proof.Policy{}
	}
	f, p := fieldsOf(v, proveKeys), proof.Default()
	if !v.IsMapping() {
		return p
	}
	broken := map[string]bool{}
	read := func(key string, set func(value)) {
		before := c.problems()
		if v := f.At(key); v.Given() {
			set(v)
		}
		broken[key] = c.problems() > before
	}
	read("command", func(v value) { p.Command = readTexts(v) })
	read("timeout", func(v value) { p.Timeout = readTime(v) })
	read("at", func(v value) { p.At = readReasons(v) })
	read("every", func(v value) { p.Every = readTime(v) })
	read("idleFor", func(v value) { p.IdleFor = readTime(v) })
	read("maxPerNode", func(v value) { p.MaxPerNode = v.Int(1, 64, "a number from 1 to 64") })
	read("windows", func(v value) { p.Windows = readWindows(v) })
	read("onFail", func(v value) {
		if text, _ := v.OneOf("unhealthy", "degraded"); text == "degraded" {
			p.OnFail = health.Degraded
		}
	})
	read("unproved", func(v value) {
		text, _ := v.OneOf("offer", "withhold")
		p.Withhold = text == "withhold"
	})
	checkProve(f, p, broken)
	return p
}

// checkProve reports what the core refuses, and keys without an effect, but for keys that have a problem already.
func checkProve(f fields, p proof.Policy, broken map[string]bool) {
	if joined, ok := p.Check().(interface{ Unwrap() []error }); ok { // of errors.Join
		for _, err := range joined.Unwrap() {
			if bad, ok := errors.AsType[*setting.Error](err); ok && !broken[bad.Key] {
				v := f.At(bad.Key)
				if bad.Key == "command" && v.IsList() && len(v.Items()) > 0 {
					v = v.Items()[0] // the program
				}
				v.Failf("want %s", bad.Remedy)
			}
		}
	}
	without := func(r proof.Reason, keys ...string) {
		for _, v := range f.Given(keys...) {
			if !broken["at"] && !slices.Contains(p.At, r) {
				v.Failf("has no effect: prove.at has no %v", r)
			}
		}
	}
	without(proof.Idle, "every", "windows")
	if p.Withhold {
		without(proof.Boot, "unproved")
	}
}

func readTexts(v value) (all []string) {
	for _, item := range v.Items() {
		if text, ok := item.Scalar(); ok {
			all = append(all, text)
		}
	}
	return all
}

func readReasons(v value) (all []proof.Reason) {
	for _, item := range v.Items() {
		text, ok := item.OneOf(reasonNames()...)
		var r proof.Reason
		if ok && r.UnmarshalText([]byte(text)) == nil && !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}

func readTime(v value) time.Duration {
	text, ok := v.Scalar()
	d, err := time.ParseDuration(text)
	if ok && err != nil {
		v.Failf("want a time such as 60s, 10m or 168h")
	}
	return d
}

func readWindows(v value) (all []proof.Window) {
	for _, item := range v.Items() {
		if w, ok := readWindow(item); ok {
			all = append(all, w)
		}
	}
	return all
}

func readWindow(v value) (w proof.Window, ok bool) {
	f := fieldsOf(v, windowKeys)
	if !v.IsMapping() {
		return w, false
	}
	for _, item := range f.At("days").Items() {
		if text, ok := item.OneOf(dayNames...); ok {
			w.Days = append(w.Days, time.Weekday(slices.Index(dayNames, text)))
		}
	}
	if days := f.At("days"); days.IsList() && len(days.Items()) == 0 {
		days.Failf("want one day at least, or no key: %s", document.Choice(dayNames))
	}
	from, ok1 := readClock(f.At("from"))
	to, ok2 := readClock(f.At("to"))
	if ok1 && ok2 && from == to {
		f.At("to").Failf("the window ends when it begins: want another time, or no window for any time")
		return w, false
	}
	w.From, w.To = from, to
	return w, ok1 && ok2
}

// readClock reads a time of the day.
func readClock(v value) (time.Duration, bool) {
	text, ok := v.Scalar()
	if !ok {
		return 0, false
	}
	if !clock.MatchString(text) {
		v.Failf("want %s", strings.ReplaceAll(clockType.Words, "`", ""))
		return 0, false
	}
	hour, minute, _ := strings.Cut(text, ":")
	d, err := time.ParseDuration(hour + "h" + minute + "m")
	return d, err == nil
}

// ProveSummary is what the section means, in one line; "" if there is none.
func (r Result) ProveSummary() string {
	p := r.Prove
	if !p.On() {
		return ""
	}
	var at []string
	for _, one := range p.At {
		at = append(at, one.String())
	}
	all := []string{
		fmt.Sprintf("prove: %s, at %s", strings.Join(p.Command, " "), strings.Join(at, ", ")), "ended after " + short(p.Timeout),
		fmt.Sprintf("GPUs of a node at a time: %d", p.MaxPerNode), "a GPU that fails is " + p.OnFail.String(),
	}
	if p.Withhold {
		all = append(all, "after a boot a GPU takes work when it has passed, or the check could not run")
	}
	if slices.Contains(p.At, proof.Idle) {
		idle := fmt.Sprintf("idle: free for %s, and not proved for %s", short(p.IdleFor), short(p.Every))
		for _, w := range p.Windows {
			idle += ", " + w.String()
		}
		all = append(all, idle)
	}
	return strings.Join(all, "; ")
}

// short is a time without the units that are zero: 168h, 10m.
func short(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

package pictures

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// timeout is that of a step in the browser, also on a busy machine.
const timeout = 60 * time.Second

// browser is the one Chromium of the tests; each test has tabs of its own.
var browser = sync.OnceValues(func() (context.Context, error) {
	path, err := exec.LookPath("chromium")
	if err != nil {
		return nil, fmt.Errorf("%w: apt-get install chromium, or run make pictures", err)
	}
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.NoSandbox, // it does not start as root with it
		chromedp.Flag("force-color-profile", "srgb"), chromedp.Flag("hide-scrollbars", true))
	allocator, _ := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, _ := chromedp.NewContext(allocator)
	return ctx, chromedp.Do(ctx)
})

// tab is a page in the browser.
type tab struct {
	*testing.T
	ctx  context.Context
	view view

	expect func(message string) bool // messages of the console that the test causes; nil = none

	mu       sync.Mutex
	errors   []string // of the page: exceptions and messages of the console
	requests []string // URLs
}

// view is how a page is looked at.
type view struct {
	width, height int64
	scheme        string // light, dark
	phone         bool
	scripts       bool
}

var wide = view{1280, 900, "light", false, true}

// open opens a URL and waits until the page has read the agent.
func open(t *testing.T, address string, v view) *tab {
	t.Helper()
	ctx, err := browser()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	p := &tab{T: t, ctx: ctx, view: v}
	must(t, chromedp.Do(ctx), chromedp.Listen(ctx, p.note)) // the first use makes the tab, without a time limit of its own
	p.ctx, cancel = context.WithTimeout(ctx, timeout)
	t.Cleanup(cancel)
	viewport := []chromedp.EmulateViewportOption{}
	if v.phone {
		viewport = append(viewport, chromedp.EmulateScale(2), chromedp.EmulateMobile)
	}
	scheme := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: v.scheme}}
	steps := []chromedp.Action[chromedp.Void]{
		send(network.Enable, network.EnableParams{}), send(log.Enable, cdp.Empty{}), chromedp.EmulateViewport(v.width, v.height, viewport...),
		send(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: scheme}),
		send(emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !v.scripts}), chromedp.Navigate(address),
	}
	if v.scripts {
		steps = append(steps, chromedp.WaitReady(`body[data-read="yes"]`))
	}
	if err := chromedp.Do(p.ctx, steps...); err != nil {
		t.Fatalf("%v; errors of the page: %q", err, p.problems())
	}
	t.Cleanup(func() { p.checkQuiet(address) })
	return p
}

// send is a command of the protocol as an action.
func send[P any](command cdp.Command[P, cdp.Empty], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, command, params)
		return err
	})
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (p *tab) note(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		p.errors = append(p.errors, fmt.Sprintf("%+v", e.ExceptionDetails))
	case *runtime.EventConsoleAPICalled:
		for _, a := range e.Args {
			p.errors = append(p.errors, fmt.Sprintf("console.%s %s", e.Type, a.Value))
		}
	case *log.EventEntryAdded:
		p.errors = append(p.errors, e.Entry.Text+" "+e.Entry.URL)
	case *network.EventRequestWillBeSent:
		p.requests = append(p.requests, e.Request.URL)
	}
}

func (p *tab) problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.errors)
}

// checkQuiet checks that the page asked no other server and that the browser has nothing against it.
func (p *tab) checkQuiet(address string) {
	own, _ := url.Parse(address)
	problems := p.problems()
	if p.expect != nil {
		problems = slices.DeleteFunc(problems, p.expect)
	}
	if len(problems) > 0 {
		p.Errorf("the console has %q", problems)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.requests {
		if u, err := url.Parse(r); err != nil || u.Host != own.Host && u.Scheme != "data" {
			p.Errorf("a request to %s", r)
		}
	}
	if len(p.requests) == 0 {
		p.Errorf("no request was seen")
	}
}

// eval returns the value of an expression in the page.
func eval[T any](p *tab, expression string) T {
	p.Helper()
	value, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		p.Fatalf("%s: %v", expression, err)
	}
	return value
}

// text is what the page shows, with single spaces.
func (p *tab) text() string {
	return strings.Join(strings.Fields(eval[string](p, "document.body.innerText")), " ")
}

func (p *tab) shows(parts ...string) {
	p.Helper()
	text := p.text()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			p.Errorf("%q is not in %s", part, text)
		}
	}
}

func (p *tab) screenshot() []byte {
	p.Helper()
	action := chromedp.FullScreenshot(100)
	if p.view.phone {
		action = chromedp.CaptureScreenshot() // what is on the screen
	}
	png, err := chromedp.Run(p.ctx, action)
	must(p.T, err)
	return png
}

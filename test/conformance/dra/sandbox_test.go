package dra

import (
	"flag"
	"io"
	"os"
	"testing"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

func TestMain(m *testing.M) {
	sandbox.Main(m, func() {
		if os.Getenv("TANDEM_CONFORMANCE_KLOG") == "" {
			quiet := flag.NewFlagSet("", flag.ContinueOnError)
			klog.InitFlags(quiet)
			_ = quiet.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})
			klog.SetOutput(io.Discard)
		}
		// The tests wait most of the time, among others for the second between two looks of a kubelet at its folder. Linux allows 128
		// inotify instances by default, an agent has nine, and a kubelet without one finds no driver.
		_ = flag.Set("test.parallel", "6")
		flag.Parse()
	})
}

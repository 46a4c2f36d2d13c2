package pictures

import (
	"os"
	"testing"
)

func TestLook(t *testing.T) {
	url := h100x8().serve(t)
	for name, v := range map[string]view{
		"light": wide, "dark": {1280, 900, "dark", false, true}, "phone": {390, 844, "light", true, true}, "noscript": {1280, 900, "light", false, false},
	} {
		p := open(t, url, v)
		os.WriteFile("/tmp/pictures/"+name+".png", p.screenshot(), 0o644)
		t.Log(p.text())
	}
}

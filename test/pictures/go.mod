// The tests drive a browser and parse PromQL, with libraries that the product does not have.
module github.com/tandem-gpu/tandem/test/pictures

go 1.26.0

require (
	github.com/chromedp/cdproto v0.159.0
	github.com/chromedp/chromedp v0.23.0
	github.com/tandem-gpu/tandem v0.0.0
)

require (
	github.com/cenkalti/backoff/v5 v5.0.3 // indirect
	github.com/go-json-experiment/json v0.0.0-20260213210345-44df1a37e875 // indirect
)

replace github.com/tandem-gpu/tandem => ../..
